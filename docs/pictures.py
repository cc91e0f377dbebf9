"The two pictures of the architecture page, as SVG that takes the page's colours."
from html import escape

WIDE, HIGH = 150, 46  # px of a box


def _box(x, y, text, note=""):
    lines = [f'<rect x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="6" fill="none" stroke="currentColor"/>',
             f'<text x="{x + WIDE/2}" y="{y + (20 if note else 28)}" text-anchor="middle" font-weight="600">{escape(text)}</text>']
    if note: lines.append(f'<text x="{x + WIDE/2}" y="{y + 36}" text-anchor="middle" font-size="11" opacity=".75">{escape(note)}</text>')
    return lines


def _arrow(x1, y1, x2, y2, text="", dx=0, dy=-6):
    line = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#0072b2" stroke-width="2" marker-end="url(#tip)"/>'
    said = f'<text x="{(x1 + x2)/2 + dx}" y="{(y1 + y2)/2 + dy}" text-anchor="middle" font-size="11">{escape(text)}</text>'
    return [line] + ([said] if text else [])


def _svg(width, height, title, parts):
    tip = ('<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
           '<path d="M0,0 L8,4 L0,8 z" fill="#0072b2"/></marker></defs>')
    return (f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" font-family="sans-serif" font-size="13" '
            f'fill="currentColor" style="max-width:{width}px;width:100%">{tip}{"".join(parts)}</svg>')


def colocated() -> str:
    "One process, one GPU: engine and policy take turns."
    x = [10, 215, 420, 625]
    parts = [*_box(x[0], 20, "Engine", "vLLM, generates"), *_box(x[1], 20, "Rollouts", "tokens, log-probs"),
             *_box(x[2], 20, "Rewards", "advantages"), *_box(x[3], 20, "Policy", "loss, optimizer step")]
    for a, b in zip(x, x[1:]): parts += _arrow(a + WIDE, 43, b - 3, 43)
    parts += ['<path d="M700,66 V120 H85 V70" fill="none" stroke="#0072b2" stroke-width="2" marker-end="url(#tip)"/>',
              '<text x="392" y="112" text-anchor="middle" font-size="11">weight sync: from memory to memory, then compared</text>',
              '<text x="392" y="140" text-anchor="middle" font-size="11">the engine sleeps while the policy trains, as deep as it must</text>']
    return _svg(785, 150, "The co-located cycle: engine, rollouts, rewards, policy, and the weights back into the engine", parts)


def asynchronous() -> str:
    "Servers sample while the policy trains."
    parts = [*_box(10, 20, "Trainer", "LoRA policy, TRL"), *_box(300, 20, "Adapter store", "whole or not there"),
             *_box(10, 160, "Rollout worker", "rewards, groups"), *_box(300, 160, "Proxy", "all or none, prefixes"),
             *_box(600, 110, "vLLM server 1"), *_box(600, 210, "vLLM server 2")]
    parts += _arrow(160, 43, 297, 43, "publish version v+1") + _arrow(375, 66, 375, 157, "announce", 34, 4)
    parts += _arrow(160, 176, 297, 176, "token ids") + _arrow(300, 196, 163, 196, "completions", 0, 16)
    parts += _arrow(450, 176, 597, 136, "prompts, load v+1", -12) + _arrow(450, 192, 597, 230)
    parts += _arrow(85, 160, 85, 69, "groups, at most max_staleness old", 108, 4)
    return _svg(765, 270, "Asynchronous LoRA: trainer, adapter store, proxy, servers, rollout worker", parts)


PICTURES = dict(colocated=colocated, asynchronous=asynchronous)
