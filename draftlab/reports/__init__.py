"""Results in, a page for people out.

Read page.py (what is said), then html.py and its template; markdown.py writes the same as text.
"""
