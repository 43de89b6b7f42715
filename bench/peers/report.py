"""A run of run.py as a Markdown table and as a plot."""

from html import escape
from statistics import median

COLOURS = {
    "bml": "#d1495b",
    "llama.cpp": "#2e6f95",
    "ctranslate2": "#66a182",
    "torch": "#edae49",
    "torch-compile": "#b5651d",
    "onnxruntime": "#8d96a3",
}


def ratios(cell, name):
    """Theirs over ours, round by round."""
    return [t / o["ms"] for t, o in zip(cell["peers"][name], cell["ours"])]


def best_peer(cell):
    measured = [name for name, times in cell["peers"].items() if times]
    return min(measured, key=lambda name: median(ratios(cell, name)), default=None)


def peer_text(cell, name, best):
    if not cell["peers"].get(name):
        return "-"
    r = ratios(cell, name)
    text = f"{median(cell['peers'][name]):.2f} ({median(r):.2f}x, {min(r):.2f} to {max(r):.2f})"
    return f"**{text}**" if name == best else text


def least_text(cell, ours):
    """What other programs on the machine disturb least."""
    least = min(((min(t), name) for name, t in cell["peers"].items() if t), default=None)
    return f"{least[0] / ours:.2f}x ({least[1]} {least[0]:.2f} over {ours:.2f})" if least else "-"


def table(run):
    names = list(run["peer_formats"])
    every = [o for cell in run["results"] for o in cell["ours"]]
    lines = [
        f"{run['processor']}, {run['threads']} threads, {run['model']}, {run['date']}. "
        + ", ".join(f"{p} {v}" for p, v in run["versions"].items())
        + ".",
        "",
        f"Milliseconds a decode step at about {run['context']} tokens of context, and a prefill of "
        f"{run['prompt']} tokens a sequence: medians of {run['rounds']} rounds. In brackets, "
        "theirs over ours in the same round: median, least and greatest. Bold: the best peer. "
        "Last column: the least time of any peer over our least.",
        "",
        "| weights | batch | work | bml | of limit | " + " | ".join(names) + " | least |",
        "|---|---|---|---|---|" + "---|" * len(names) + "---|",
    ]
    for cell in run["results"]:
        ours = [o["ms"] for o in cell["ours"]]
        limit = median(o["of_limit"] for o in cell["ours"])
        best = best_peer(cell)
        row = [
            cell["format"],
            str(cell["batch"]),
            cell["phase"],
            f"{median(ours):.2f} ({min(ours):.2f} to {max(ours):.2f})",
            f"{100 * limit:.0f}%",
            *(peer_text(cell, name, best) for name in names),
            least_text(cell, min(ours)),
        ]
        lines.append("| " + " | ".join(row) + " |")
    for key, unit in (("read_gb_s", "GB/s read"), ("gflop_s", "GFLOP/s in float32")):
        values = [o[key] for o in every]
        lines += [
            "",
            f"Measured limit: {median(values):.1f} {unit}"
            f" ({min(values):.1f} to {max(values):.1f}).",
        ]
    lines += ["", f"Peers' formats: {'; '.join(map(formats_text, run['peer_formats'].items()))}."]
    return "\n".join(lines)


def formats_text(item):
    name, formats = item
    return f"{name}: " + ", ".join(f"{ours} = {theirs}" for ours, theirs in formats.items())


# ---- the plot ----------------------------------------------------------------------------------

WIDTH, PANEL_HEIGHT, LEFT, TOP, GAP = 960, 190, 20, 70, 60  # pixels


def text(x, y, content, size=12, anchor="start", extra=""):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{extra}>'
        f"{escape(str(content))}</text>"
    )


def rate(cell, milliseconds):
    tokens = cell["batch"] * (1 if cell["phase"] == "decode" else cell["prompt"])
    return 1e3 * tokens / milliseconds


def panel(cells, names, top):
    """Bars of tokens a second, a group for each format."""
    bars = []
    for cell in cells:
        measured = {"bml": [o["ms"] for o in cell["ours"]], **cell["peers"]}
        bars.append({n: rate(cell, median(measured[n])) for n in names if measured.get(n)})
    highest = max(max(group.values()) for group in bars)
    group_width = (WIDTH - 2 * LEFT) / len(cells)
    bar_width = (group_width - 24) / len(names)
    bottom = top + PANEL_HEIGHT
    out = [f'<line x1="{LEFT}" y1="{bottom}" x2="{WIDTH - LEFT}" y2="{bottom}" stroke="#999"/>']
    for g, (cell, group) in enumerate(zip(cells, bars)):
        x = LEFT + g * group_width + 12
        out.append(text(x + (group_width - 24) / 2, bottom + 16, cell["format"], 13, "middle"))
        for i, name in enumerate(names):
            if name not in group:
                continue
            height = max(1, (PANEL_HEIGHT - 30) * group[name] / highest)
            left = x + i * bar_width
            out.append(
                f'<rect x="{left:.1f}" y="{bottom - height:.1f}" width="{bar_width - 2:.1f}" '
                f'height="{height:.1f}" fill="{COLOURS[name]}"/>'
            )
            label = f"{group[name]:.0f}"
            out.append(text(left + bar_width / 2 - 1, bottom - height - 4, label, 9, "middle"))
    return out


def svg(run):
    names = ["bml", *run["peer_formats"]]
    panels = {}
    for cell in run["results"]:
        panels.setdefault((cell["phase"], cell["batch"]), []).append(
            {**cell, "prompt": run["prompt"]}
        )
    height = TOP + len(panels) * (PANEL_HEIGHT + GAP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        text(
            LEFT,
            24,
            f"{run['model']}, {run['threads']} threads of {run['processor']}: tokens a second",
            15,
        ),
    ]
    for i, name in enumerate(names):
        x = LEFT + 150 * i
        out.append(f'<rect x="{x}" y="38" width="12" height="12" fill="{COLOURS[name]}"/>')
        out.append(text(x + 17, 49, name))
    for i, ((phase, batch), cells) in enumerate(sorted(panels.items())):
        top = TOP + i * (PANEL_HEIGHT + GAP)
        what = f"{phase}, {batch} sequence{'s' * (batch > 1)}"
        out.append(text(LEFT, top + 12, what, 13, extra=' font-weight="bold"'))
        out += panel(cells, names, top)
    return "\n".join([*out, "</svg>"]) + "\n"
