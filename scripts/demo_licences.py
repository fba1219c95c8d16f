"""Reads the licence of a package from its metadata, and says whether it is permissive."""

import email

PERMISSIVE = {
    "mit": "MIT",
    "mit license": "MIT",
    "bsd": "BSD",
    "bsd license": "BSD",
    "bsd-2-clause": "BSD-2-Clause",
    "2-clause bsd": "BSD-2-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "revised bsd license": "BSD-3-Clause",
    "apache-2.0": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "psf-2.0": "PSF-2.0",
    "python software foundation license": "PSF-2.0",
    "isc": "ISC",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
}
"""Names of permissive licences as packages write them, and their common names."""


def licence_of(metadata: str) -> str | None:
    """The permissive licence in a wheel's METADATA; None if it has none, or others beside it.

    If there is a licence expression, it counts, otherwise the classifiers, then the free field.
    """
    fields = email.message_from_string(metadata)
    expression = fields.get("License-Expression")
    if expression is not None:
        return of_expression(str(expression))
    classified = [
        str(c).split("::")[-1].strip()
        for c in fields.get_all("Classifier", [])
        if str(c).startswith("License ::") and str(c) != "License :: OSI Approved"
    ]
    if classified:
        return joined(classified, " AND ")
    return joined([str(fields.get("License", ""))], "")


def of_expression(expression: str) -> str | None:
    """The permissive part of a licence expression: choices joined by OR, of which those with a
    licence that is not permissive are left out; None if none is left."""
    choices = [joined(one.strip("() ").split(" AND "), " AND ") for one in expression.split(" OR ")]
    return " OR ".join(choice for choice in choices if choice is not None) or None


def joined(names: list[str], word: str) -> str | None:
    common = [PERMISSIVE.get(name.strip().lower()) for name in names]
    return word.join(dict.fromkeys(name for name in common if name)) if all(common) else None
