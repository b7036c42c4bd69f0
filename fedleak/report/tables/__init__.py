"""The tables of reports, as values that a terminal and a page show."""
