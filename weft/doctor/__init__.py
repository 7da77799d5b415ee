"""Check nodes, devices, networks and images: facts, then findings.

Read `weft.doctor.doctor` first; `weft.doctor.node_facts` lists the facts.
"""
