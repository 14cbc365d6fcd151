"""Results in, a page for people out.

Read html.py and its template; markdown.py writes the same numbers as text.
"""
