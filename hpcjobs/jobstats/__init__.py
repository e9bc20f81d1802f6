"""Reads the jobs of a site as a table, from sacct or substitutes; totals and advice. Needs the extra ``report``."""
