"""Reports for a browser: one HTML file of a run or a sweep, which asks no other place for anything.

What is shown is typed values (`page`), made from the files of a run and what scoring returned
(`run_page`, `sweep_page`, `verdict`, `pictures`), and written by templates (`render`).
"""
