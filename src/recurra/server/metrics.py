"""What ``/metrics`` shows, in Prometheus' form. One registry for each app, so that tests don't share."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from recurra import __version__

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

#: Engine statistic (``EngineStats`` field) to gauge name and help.
_GAUGES = {
    "waiting": ("recurra_requests_waiting", "Sequences that wait for a slot."),
    "running": ("recurra_requests_running", "Sequences that hold a slot."),
    "used_slots": ("recurra_state_slots_used", "State slots in use."),
    "free_slots": ("recurra_state_slots_free", "State slots that are free."),
    "prefix_hit": ("recurra_prefix_hit", "Prompts that began from a kept state."),
    "prefix_no_snapshot": ("recurra_prefix_no_snapshot", "Prompts whose beginning was never kept."),
    "prefix_evicted": ("recurra_prefix_evicted", "Prompts whose kept state was given up for want of room."),
    "prefix_salted_away": ("recurra_prefix_salted_away", "Prompts kept under another salt only."),
    "prefix_pages_gone": ("recurra_prefix_pages_gone", "Prompts whose kept state lost its pages."),
    "prefix_prompt_logprobs": (
        "recurra_prefix_prompt_logprobs",
        "Prompts computed whole for prompt_logprobs.",
    ),
    "kept_states": ("recurra_kept_states", "States that are kept, wherever."),
    "device_state_bytes": ("recurra_kept_state_bytes_device", "Bytes of kept states on the device."),
    "host_state_bytes": ("recurra_kept_state_bytes_host", "Bytes of kept states in the host's memory."),
    "disk_state_bytes": ("recurra_kept_state_bytes_disk", "Bytes of kept states in files."),
    "states_given_up": ("recurra_kept_states_given_up", "Kept states that went for want of room."),
    "states_damaged": ("recurra_kept_states_damaged", "Files of states that were left aside."),
    "used_pages": ("recurra_kv_pages_used", "Pages of keys and values in use."),
    "free_pages": ("recurra_kv_pages_free", "Pages of keys and values that are free."),
    "preemptions": ("recurra_preemptions", "Times that a sequence gave its pages to an older one."),
}


class Metrics:
    """Counters, gauges and histograms of one server."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        info = Gauge("recurra_build_info", "Version of Recurra.", ["version"], registry=registry)
        info.labels(__version__).set(1)
        self.engine_up = Gauge("recurra_engine_up", "1 while the engine serves.", registry=registry)
        self.engine_restarts = Counter(
            "recurra_engine_restarts", "Starts of the engine process after the first.", registry=registry
        )
        self.prompt_tokens = Counter("recurra_prompt_tokens", "Prompt tokens taken in.", registry=registry)
        self.cached_tokens = Counter(
            "recurra_cached_prompt_tokens", "Prompt tokens whose state was reused.", registry=registry
        )
        self.generation_tokens = Counter("recurra_generation_tokens", "Tokens generated.", registry=registry)
        self.time_to_first_token = Histogram(
            "recurra_time_to_first_token_seconds",
            "From submission to the first token.",
            buckets=_FIRST,
            registry=registry,
        )
        self.time_between_tokens = Histogram(
            "recurra_time_between_tokens_seconds",
            "Between two tokens of an answer.",
            buckets=_FAST,
            registry=registry,
        )
        self.request_seconds = Histogram(
            "recurra_request_seconds",
            "From submission to the last token.",
            buckets=_WHOLE,
            registry=registry,
        )
        self.finished = Counter(
            "recurra_requests_finished", "Answers ended, by reason.", ["reason"], registry=registry
        )
        self.errors = Counter("recurra_errors", "Error replies, by kind.", ["kind"], registry=registry)
        self.http = Counter(
            "recurra_http_requests",
            "HTTP requests, by route and status.",
            ["route", "status"],
            registry=registry,
        )
        self.gauges = {field: Gauge(name, text, registry=registry) for field, (name, text) in _GAUGES.items()}

    def take(self, values: Mapping[str, float]) -> None:
        """Set the gauges from the engine's statistics."""
        for field, gauge in self.gauges.items():
            if field in values:
                gauge.set(values[field])

    def engine_gone(self) -> None:
        """Nothing runs and no slot exists while there is no engine."""
        self.engine_up.set(0)
        for gauge in self.gauges.values():
            gauge.set(0)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
