"""Compiled programs that are kept in a folder, so that the next process need not compile them."""
