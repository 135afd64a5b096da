"""The patched llama.cpp as Python sees it: its libraries, devices, graphs, RPC servers."""
