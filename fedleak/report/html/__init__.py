"""Reports for a browser: one HTML file of a run or a sweep, which loads nothing else.

A report is typed values (`page`). `run_page`, `sweep_page`, `verdict` and `pictures` make them from
the files of a run and from the result of scoring; `render` writes them with templates.
"""
