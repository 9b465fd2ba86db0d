"""Covering arrays: few rows of options in which every allowed pair of values occurs."""
