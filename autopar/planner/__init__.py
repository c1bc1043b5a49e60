"""The planner: captured graph -> Problem -> Solution -> Plan. Needs no device and no process group."""
