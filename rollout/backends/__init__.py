"""Everything that differs between devices, behind the protocols of base.py.

cpu/ and cuda/ implement them; ops/ and executors/ hold what both share.
"""
