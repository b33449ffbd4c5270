"""The page about a run: its measurements, pictures, tables and words.

A report is a view of a record, a certificate, metrics and an audit; it computes no guarantee of its
own. One self-contained HTML file, with a version that may be published. Never needs torch.
"""
