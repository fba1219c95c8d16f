"""Errors about what the interpreter cannot do, or what no kernel may do."""


class Refused(Exception):
    """An instruction, or a form of one, that this interpreter does not know."""


class WrongAccess(Exception):
    """An access that no kernel may make, such as reading beyond an array."""


def require(holds: object, what: str) -> None:
    if not holds:
        raise Refused(what)
