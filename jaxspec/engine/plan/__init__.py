"""Options of an engine, and the fixed sizes and choices that follow from them."""
