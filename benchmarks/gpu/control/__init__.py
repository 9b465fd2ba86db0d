"""A run in parts: what is measured first, for how long, and what remains of it when something ends early.

parts.py     the parts, in the order of their worth
needs.py     what a part cannot do without
runner.py    each part in a separate process with a limit; restarted after the case that ended it
child.py     … that process
record.py    cases of a part: done once, each with its lines as soon as it ends
lines.py     the lines: one file of JSON lines for the whole run
state.py     how each part ended
folder.py    the folder with all of it, in few files of limited size
machine.py   versions, commit, clocks
report.py    the table
"""
