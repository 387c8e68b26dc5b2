"""Measurements that users can repeat: ``recurra bench``."""
