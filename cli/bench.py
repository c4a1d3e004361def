"""`mlx-voicechat bench`: how fast this machine runs a model, what a frame costs, and what memory it takes."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from typer import Option

from mlx_voicechat.options import LoadOptions

from .machines import helps, load_on_several, several
from .offline import INTERRUPTED, Interrupt
from .options import (
    COMPILED,
    DEFAULT_MODEL,
    Arithmetic,
    Bandwidth,
    KeyValueCache,
    ModelArgument,
    ShardLlm,
    SpeechWeights,
    option_of,
)
from .outputs import Targets, TextFile
from .profiling import frames_file, wants_parts
from .render import Output, note, progress_bar

STAGE_WIDTH, NUMBER_WIDTH, BAR_WIDTH = 12, 9, 40
LONGEST_MINUTES = 600.0


def bench(
    model: ModelArgument = DEFAULT_MODEL,
    frames: Annotated[int, Option(metavar="N", min=1, help="Frames of 80 ms; the first five are not timed.")] = 250,
    compiled: Annotated[
        bool,
        option_of(
            LoadOptions,
            "compile",
            *COMPILED,
            help="Fuse kernels first; on a CPU that takes a while.",
            show_default=True,
        ),
    ] = True,
    sessions: Annotated[int, Option(metavar="N", min=1, max=1000, help="Measure up to so many together, too.")] = 1,
    bandwidth: Bandwidth = None,
    speech_weights: SpeechWeights = LoadOptions.speech_weights,
    kv_cache: KeyValueCache = LoadOptions.kv_cache,
    arithmetic: Arithmetic = LoadOptions.arithmetic,
    minutes: Annotated[
        float,
        Option(metavar="M", min=0, max=LONGEST_MINUTES, help="Then frames without a pause for so long: their curve."),
    ] = 0.0,
    shard_llm: ShardLlm = LoadOptions.shard_llm,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object, not tables.")] = False,
) -> None:
    """Measure a model on this machine: frame times, launches, memory, and what memory traffic alone would take.

    It hears a quiet room. Stage times come from frames that wait for the device after each stage, the total and the
    real-time factor from those between them.
    """
    load_options = LoadOptions(compiled, speech_weights, kv_cache, arithmetic, shard_llm=shard_llm)
    if helps(model, load_options):
        return
    targets = Targets(profile_frames=frames_file())
    targets.check("-")

    from mlx_voicechat.gauges.bench import bench as measure
    from mlx_voicechat.voicechat import load_opened

    output = Output()
    with Interrupt() as interrupt, progress_bar(total=frames, unit=" frames") as bar:
        report, every_frame = measure(
            model,
            frames,
            load_options,
            bandwidth_gbps=bandwidth,
            parts=wants_parts(),
            sessions=sessions,
            say=note,
            progress=lambda done: bar.update(done - bar.n),
            stop=lambda: interrupt.pressed,
            minutes=minutes,
            load=load_on_several if several() else load_opened,
        )
    if targets.profile_frames:
        with TextFile(targets.profile_frames) as file:
            file.write(json.dumps(every_frame, indent=1) + "\n")
    output.write(json.dumps(report) + "\n" if as_json else tables(report))
    if report["frames"] < frames:
        note(f"interrupted after {report['frames']} of {frames} frames.")
        raise typer.Exit(INTERRUPTED)


def tables(report: dict[str, Any]) -> str:
    """The report for a person to read."""
    sections = [_heading(report), _times(report), _together(report), _sustained(report)]
    sections += [_counts(report), _memory(report)]
    notes = "".join(f"note: {text}\n" for text in report["notes"])
    return "\n".join(section for section in [*sections, notes] if section)


def _heading(report: dict[str, Any]) -> str:
    machine = report["machine"]
    compiled = "compiled" if machine["compiled"] else "not compiled"
    return (
        f"{report['model']}: {report['frames']} frames of {report['budget_ms']:g} ms\n"
        f"{machine['chip']}, {machine['cores']} cores, {_size(machine['memory_bytes'])}, {machine['platform']}\n"
        f"MLX {machine['mlx']} on the {machine['device'].upper()}, {compiled}, Python {machine['python']}\n"
    )


def _times(report: dict[str, Any]) -> str:
    floor, bandwidth = report["floor"], report["bandwidth"]
    lines = [_row("ms", "mean", "p50", "p95", "max", "floor", "moves")]
    for stage, times in report["stages"].items():
        below = floor[stage]
        lines.append(_row(stage, *_values(times), _number(below["floor_ms"]), _size(below["bytes"])))
    for part, times in report.get("sub_stages", {}).items():
        lines.append(_row(part, *_values(times)))
    source = "measured" if bandwidth["measured"] else "as given"
    lines.append(f"real-time factor {_number(report['realtime_factor'])}: a frame's mean time over its length")
    lines.append(f"the floor is the time to move those bytes at {bandwidth['gbps']:.1f} GB/s ({source})")
    if growth := report["growth"]:
        first, last = growth["first_p50_ms"], growth["last_p50_ms"]
        lines.append(f"p50 of the first thousand frames {first:.2f}, of the last {last:.2f}: {last - first:+.2f} ms")
    return "\n".join(lines) + "\n"


def _together(report: dict[str, Any]) -> str:
    if (together := report.get("together")) is None:
        return ""
    lines = [_row("sessions", "mean", "p50", "p95", "max")]
    lines += [_row(rows, *_values(times)) for rows, times in together["rows"].items()]
    lines.append(f"{together['real_time_sessions']} of {together['sessions']} sessions together run in real time")
    return "\n".join(lines) + "\n"


def _sustained(report: dict[str, Any]) -> str:
    """The curve of a machine that has no rest: a bar is as long as the median frame."""
    parts = report.get("sustained", [])
    if not parts:
        return ""
    longest = max(part["p50_ms"] for part in parts)
    lines = [_row("without rest", "p50", "p95", "frames")]
    for part in parts:
        bar = "#" * round(BAR_WIDTH * part["p50_ms"] / longest)
        cells = _number(part["p50_ms"]), _number(part["p95_ms"]), str(part["frames"])
        lines.append(_row(f"from {part['second']:.0f} s", *cells) + f"  {bar}")
    first, last = parts[0]["p50_ms"], parts[-1]["p50_ms"]
    lines.append(f"the last part's median frame takes {last / first:.2f} of the first one's time")
    return "\n".join(lines) + "\n"


def _counts(report: dict[str, Any]) -> str:
    counted, opening = report["counted_frame"], report["opening_seconds"]
    reads = ", ".join(f"{name.strip('_')} {count}" for name, count in counted["reads"].items())
    several = "" if report["evaluations"] == 1 else "s"
    gpu = report["gpu"]
    also = f", {gpu['launches_compiled']:,} compiled" if "launches_compiled" in gpu else ""
    return (
        f"as a GPU starts them: {gpu['launches']:,} launches uncompiled{also}\n"
        f"one frame: {report['primitives']:,} primitives, {report['launches']:,} launches, "
        f"{report['evaluations']} evaluation{several} or read{several} by the host ({reads})\n"
        f"loaded in {report['load_seconds']:.2f} s, a session opened in {opening['first'] * 1000:.0f} ms, "
        f"one that opens alike in {opening['again'] * 1000:.0f} ms\n"
    )


def _memory(report: dict[str, Any]) -> str:
    memory = report["memory"]
    announced, process = memory["announced"], memory["process"]
    rows = [
        _row("memory", "announced", "measured"),
        _row("loaded", _size(announced["loaded_bytes"]), _size(memory["loaded_bytes"])),
        _row("in session", _size(announced["total_bytes"]), _size(memory["active_bytes"])),
    ]
    rows += [
        _row(f"  {name}", _size((announced["weights"] | announced).get(name, announced["constants"])), _size(size))
        for name, size in memory["resident"].items()
    ]
    grown = process["last_frame_bytes"] - process["first_frame_bytes"]
    rows.append(
        f"peak {_size(memory['peak_bytes'])}, {_size(memory['load_peak_bytes'])} of it while loading; "
        f"process {_size(process['last_frame_bytes'])}, {_size(grown)} more than at the first frame"
    )
    return "\n".join(rows) + "\n"


def _row(name: str, *cells: str) -> str:
    return (f"{name:<{STAGE_WIDTH}}" + "".join(f"{cell:>{NUMBER_WIDTH}}" for cell in cells)).rstrip()


def _values(times: dict[str, float | None]) -> list[str]:
    return [_number(times[key]) for key in ("mean_ms", "p50_ms", "p95_ms", "max_ms")]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if abs(count) >= 1e9 else f"{count / 1e6:.2f} MB"
