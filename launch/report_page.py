"""The page of a report: its frame, its look and its one script. Everything is inside the file; nothing is fetched.

Elements are built as a tree and escaped when it is written, so that no text of a run can become markup.
"""

import re
from collections.abc import Sequence
from xml.etree import ElementTree

Node = ElementTree.Element

# The colours c0 to c5 differ in lightness too, so that they stay apart for every kind of colour blindness; each has a contrast of
# 4.5 with the page. Lines differ in their dashes as well, and versions in their labels: no colour carries a meaning alone.
STYLE = """
:root {
  color-scheme: light dark;
  --page: #fdfdfc; --ink: #1c1e21; --muted: #575d64; --line: #dfe2e5; --panel: #f4f5f5;
  --c0: #1f4fe0; --c1: #be5400; --c2: #2e8358; --c3: #a253a6; --c4: #592b00; --c5: #34353b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15171a; --ink: #e6e8ea; --muted: #a3aab2; --line: #33383d; --panel: #1e2124;
    --c0: #5b9bf8; --c1: #d2693f; --c2: #7df0ac; --c3: #b8709a; --c4: #f3d04e; --c5: #dfe6fe;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 78rem; padding: 2.5rem clamp(1rem, 3vw, 2rem) 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; -webkit-text-size-adjust: 100%; }
h1 { margin: 0; font-size: 1.9rem; line-height: 1.2; letter-spacing: -0.015em; }
h2 { margin: 3.5rem 0 0; padding-top: 1rem; border-top: 1px solid var(--line); font-size: 1.3rem; line-height: 1.3; }
h3 { margin: 0; font-size: 1rem; line-height: 1.4; }
p { margin: 0.35rem 0; max-width: 50rem; overflow-wrap: anywhere; }
a { color: var(--c0); }
.muted, figcaption p, caption, th, nav { color: var(--muted); }
nav { margin-top: 1.5rem; display: flex; flex-wrap: wrap; gap: 0.25rem 1.25rem; }
.tables { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 1.5rem 4rem; margin-top: 1.5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { padding-bottom: 0.3rem; text-align: left; font-size: 0.875rem; }
th, td { padding: 0.3rem 0; border-top: 1px solid var(--line); text-align: left; vertical-align: baseline; font-weight: 400; }
td { padding-left: 1.5rem; text-align: right; font-weight: 600; overflow-wrap: anywhere; }
thead td { border: 0; }
thead th { border: 0; padding: 0 0 0.1rem 1.5rem; text-align: right; font-size: 0.875rem; }
details { margin-top: 1rem; }
summary { cursor: pointer; color: var(--muted); }
pre { margin: 0.75rem 0 0; padding: 0.75rem 1rem; background: var(--panel); border-radius: 4px; white-space: pre-wrap;
  overflow-wrap: anywhere; }
pre, .turn { font: 0.85rem/1.6 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
figure { margin: 0; min-width: 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20.5rem), 1fr)); gap: 2.25rem 2.5rem;
  margin-top: 1.5rem; }
.plots figure { display: flex; flex-direction: column; }
.at { float: right; font-size: 0.875rem; font-weight: 400; font-variant-numeric: tabular-nums; }
figcaption p { margin: 0.1rem 0 0; font-size: 0.875rem; line-height: 1.4; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0.05rem 1rem; margin: 0.35rem 0 0.75rem; padding: 0;
  font-size: 0.875rem; font-variant-numeric: tabular-nums; }
.legend .swatch { width: 1.5rem; height: 0.75rem; margin-right: 0.35rem; vertical-align: -0.05rem; }
.value { font-weight: 600; }
.frame { position: relative; height: 9.5rem; margin: auto 0.75rem 1.6rem 3.25rem; font-size: 0.75rem; line-height: 1;
  color: var(--muted); font-variant-numeric: tabular-nums; touch-action: pan-y; }
.frame svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.frame span { position: absolute; white-space: nowrap; }
.frame .y { right: calc(100% + 0.5rem); transform: translateY(50%); }
.frame .x { top: calc(100% + 0.5rem); transform: translateX(-50%); }
.frame .top { bottom: calc(100% + 0.35rem); transform: translateX(-50%); }
.frame .cursor { top: 0; bottom: 0; width: 1px; background: var(--muted); visibility: hidden; }
path { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
.grid { stroke: var(--line); stroke-width: 1px; }
.mark { stroke: var(--ink); stroke-width: 1px; }
.line { stroke: var(--c); stroke-width: 1.75px; }
.dots { stroke: var(--c); stroke-width: 6px; stroke-linecap: round; }
.fill { fill: var(--c); shape-rendering: crispEdges; }
.s0 { --c: var(--c0); } .s1 { --c: var(--c1); } .s2 { --c: var(--c2); }
.s3 { --c: var(--c3); } .s4 { --c: var(--c4); } .s5 { --c: var(--c5); }
.s1 .line { stroke-dasharray: 7 3; } .s2 .line { stroke-dasharray: 2 3; } .s3 .line { stroke-dasharray: 9 3 2 3; }
.s4 .line { stroke-dasharray: 4 4; } .s5 .line { stroke-dasharray: 1 4; }
.wait { --c: var(--line); }
.timeline { margin-top: 1.5rem; }
.timeline + .timeline { margin-top: 3.25rem; }
.timeline .frame { height: 6.5rem; }
.timeline .frame:has(.top) { margin-top: 1.75rem; }
.transcript { margin-top: 1.5rem; }
.transcript p { font-size: 0.875rem; margin: 0; }
.turns { margin-top: 0.35rem; }
.turn { display: inline-block; max-width: 100%; margin: 0 0.75rem 0.4rem 0; color: var(--muted); white-space: pre-wrap;
  overflow-wrap: anywhere; vertical-align: top; }
.policy { padding: 0.1rem 0.2rem; border-bottom: 2px solid var(--c); color: var(--ink); font-weight: 600;
  background: color-mix(in srgb, var(--c) 16%, transparent); }
.untrained { border-bottom-style: dotted; font-weight: 400; }
.tag { margin: 0 0.15rem 0 0.1rem; padding: 0 0.25rem; border-radius: 3px; background: var(--c); color: var(--page);
  font-size: 0.75rem; font-weight: 600; }
.unprintable { font-style: italic; opacity: 0.85; }
"""

# Under the pointer, the legend shows the values of that step instead of the last ones.
SCRIPT = """
for (const plot of document.querySelectorAll("[data-steps]")) {
  const steps = plot.dataset.steps.split(" ").map(Number), low = Number(plot.dataset.low), high = Number(plot.dataset.high);
  const frame = plot.querySelector(".frame"), cursor = plot.querySelector(".cursor"), at = plot.querySelector(".at");
  const values = [...plot.querySelectorAll(".value")].map(value => [value, value.dataset.values.split("|")]);
  const show = (index, visibility) => {
    at.textContent = "step " + steps[index].toLocaleString("en");
    cursor.style.left = 100 * (steps[index] - low) / (high - low) + "%";
    cursor.style.visibility = visibility;
    for (const [value, texts] of values) value.textContent = texts[index];
  };
  frame.addEventListener("pointermove", event => {
    const box = frame.getBoundingClientRect();
    const wanted = low + (high - low) * (event.clientX - box.left) / box.width;
    let index = 0;
    while (index + 1 < steps.length && steps[index + 1] <= wanted) index++;
    if (index + 1 < steps.length && steps[index + 1] - wanted < wanted - steps[index]) index++;
    show(index, "visible");
  });
  frame.addEventListener("pointerleave", () => show(steps.length - 1, "hidden"));
}
"""


def node(tag: str, *children: "Node | str | None", **attributes: str | None) -> Node:
    """An element. Attributes lose a trailing underscore, and others become hyphens; None, as a child or a value, is left out."""
    names = {name: name.rstrip("_").replace("_", "-") for name in attributes}
    element = Node(tag, {names[name]: value for name, value in attributes.items() if value is not None})
    for child in children:
        if isinstance(child, Node):
            element.append(child)
        elif child is not None and len(element):
            element[-1].tail = (element[-1].tail or "") + child
        elif child is not None:
            element.text = (element.text or "") + child
    return element


def table(title: str, rows: Sequence[Sequence[str]]) -> Node:
    """Rows of equally many cells, the first a head. A first row whose first cell is empty heads the columns."""
    head, body = (rows[0], rows[1:]) if not rows[0][0] else (None, rows)
    return node(
        "table",
        node("caption", title),
        head and node("thead", node("tr", node("td"), *(node("th", cell, scope="col") for cell in head[1:]))),
        node("tbody", *(node("tr", node("th", row[0], scope="row"), *(node("td", cell) for cell in row[1:])) for row in body)),
    )


def section(title: str, *children: Node | None) -> Node:
    """A chapter of the page, which the navigation can name."""
    return node("section", node("h2", title, id=_anchor(title)), *children)


def navigation(titles: Sequence[str]) -> Node:
    return node("nav", *(node("a", title, href=f"#{_anchor(title)}") for title in titles), aria_label="Sections")


def page(title: str, *children: Node) -> str:
    """The whole file."""
    # The policy makes the browser itself refuse whatever is not in the file; the icon keeps it from asking a server for one.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    head = node(
        "head",
        node("meta", charset="utf-8"),
        node("meta", http_equiv="Content-Security-Policy", content=policy),
        node("meta", name="viewport", content="width=device-width, initial-scale=1"),
        node("title", title),
        node("link", rel="icon", href="data:,"),
        node("style", STYLE),
    )
    html = node("html", head, node("body", *children, node("script", SCRIPT)), lang="en")
    return f"<!DOCTYPE html>\n{ElementTree.tostring(html, encoding='unicode', method='html')}\n"


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower())
