"""Engines that are pods: a reflector that knows no engines, rules that know no HTTP, and the source that joins them."""
