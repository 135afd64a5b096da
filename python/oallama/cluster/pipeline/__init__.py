"""Layers over hosts: agents on the devices' hosts, the client, what happens when one is lost."""
