"""Hosts that join by a token: `oallama cluster join` there, `oallama cluster add` here."""
