"""Engines that write responses, behind one streaming protocol."""
