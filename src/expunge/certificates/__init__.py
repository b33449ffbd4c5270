"""What ran, what it promises, and whether that holds.

A record is what ran and stays with the operator. A certificate is what may be published of it, with
every number derived; verification derives all of it again, by a second accountant that shares no
code with the first, and names whatever differs. Never needs torch.
"""
