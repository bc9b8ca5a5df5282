"""The style of every page: one column on a phone, light and dark as the reader's machine wishes."""

STYLE = """
:root { color-scheme: light dark; --back: #fff; --ink: #1c2126; --soft: #59636e; --line: #d5dae0; --card: #f5f7f9;
  --c0: #2f6aa8; --c1: #b4560f; --c2: #2f7d3b; --c3: #8a3f9c; --c4: #a3263c; --c5: #5b6470; --tip: #1c2126; --tipink: #fff; }
@media (prefers-color-scheme: dark) { :root { --back: #14181c; --ink: #e6eaee; --soft: #a3adb8; --line: #353d46;
  --card: #1d2329; --c0: #74aee6; --c1: #eda064; --c2: #7cc88a; --c3: #d09ae0; --c4: #f08a9b; --c5: #a7b0bb;
  --tip: #e6eaee; --tipink: #14181c; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 0 auto; padding: 1rem; background: var(--back);
  color: var(--ink); overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0 0 .25rem; } a { color: var(--c0); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; } td:last-child { overflow-wrap: anywhere; min-width: 6rem; }
.sorted td:last-child { overflow-wrap: normal; min-width: 0; }
td.long { min-width: 20rem; } td.n, th.n { text-align: right; white-space: nowrap; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--c0); }
th button::after { content: " \\2195"; color: var(--soft); }
svg { max-width: 100%; height: auto; } svg text { fill: currentColor; }
figure { margin: 0; } figcaption, .soft { color: var(--soft); } .error { border: 2px solid #c22a3e; padding: .5rem 1rem; }
.verdict { font-size: 1.1rem; border-left: 4px solid var(--c0); padding-left: .8rem; }
.tiles { display: grid; gap: .6rem; margin: 1rem 0; padding: 0;
  grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); }
.tiles div, .card { background: var(--card); border-radius: 8px; padding: .5rem; } .tiles dt { overflow-wrap: anywhere; }
.tiles dt { color: var(--soft); font-size: .8rem; } .tiles dd { margin: 0; font-size: 1.15rem; font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(400px, 100%), 1fr)); gap: 1rem; }
.chart { width: 100%; touch-action: pan-y; } .chart path { fill: none; stroke-width: 2; }
.grid { stroke: var(--line); } .k0 { stroke: var(--c0); } .k1 { stroke: var(--c1); } .k2 { stroke: var(--c2); }
.k3 { stroke: var(--c3); } .k4 { stroke: var(--c4); } .k5 { stroke: var(--c5); }
.f0 { fill: var(--c0); } .f1 { fill: var(--c1); } .f2 { fill: var(--c2); } .f3 { fill: var(--c3); } .f4 { fill: var(--c4); }
.f5 { fill: var(--c5); } .key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .3em; }
.b0 { background: var(--c0); } .b1 { background: var(--c1); } .b2 { background: var(--c2); } .b3 { background: var(--c3); }
.b4 { background: var(--c4); } .b5 { background: var(--c5); } .keys > span { margin-right: 1em; display: inline-block; }
.scroll { overflow: auto; max-height: 75vh; } .scroll thead th { position: sticky; top: 0; background: var(--back); }
.heat td, .heat thead th { padding: .15rem .5rem; border: 1px solid var(--back); text-align: right; }
.heat td, .heat td:last-child { min-width: 2.4rem; } .heat thead th:first-child, .heat th:first-child { text-align: left; }
.s0 { background: #f2f5f8; color: #4a5159; } .s1 { background: #d6e4f2; color: #1c2126; }
.s2 { background: #a9c9e8; color: #1c2126; } .s3 { background: #7caedd; color: #14181c; }
.s4 { background: #2f6aa8; color: #fff; } .s5 { background: #163e69; color: #fff; }
@media (prefers-color-scheme: dark) { .s0 { background: #1d2329; color: #a3adb8; } .s1 { background: #16324f; color: #fff; }
  .s2 { background: #1d4d7c; color: #fff; } .s3 { background: #2f6aa8; color: #fff; }
  .s4 { background: #7caedd; color: #14181c; }
  .s5 { background: #c3ddf5; color: #14181c; } }
.pictures img { max-width: 100%; height: auto; image-rendering: pixelated; display: block; background: #fff; }
.pictures figure { margin-bottom: 1rem; } .slider { display: flex; gap: 1rem; align-items: center; flex-wrap: wrap; }
.slider input { flex: 1; min-width: 200px; height: 2rem; accent-color: var(--c0); }
.axis { border: 0; padding: 0; margin: 0 0 1rem; }
.axis label { margin-right: 1rem; } .axis legend { float: left; margin-right: 1rem; }
[data-axis="round"] .by-traffic, [data-axis="traffic"] .by-round { display: none; }
#tip { position: fixed; z-index: 9; pointer-events: none; background: var(--tip); color: var(--tipink); padding: .2rem .5rem;
  border-radius: 4px; font-size: .85rem; max-width: 280px; white-space: pre-line; }
pre { overflow: auto; max-height: 60vh; background: var(--card); padding: .6rem; white-space: pre-wrap; }
summary { cursor: pointer; } [hidden] { display: none !important; }
.lines table { width: 100%; table-layout: fixed; } .lines th { width: 30%; } .lines th:last-child { width: auto; }
@media (max-width: 600px) { th, td { padding-right: .4rem; } main > section > table { font-size: .9rem; }
  thead ~ tbody td:last-child { min-width: 0; } .lines thead { display: none; }
  .lines tr { display: flex; flex-wrap: wrap; gap: 0 .6rem; border-bottom: 1px solid var(--line); padding: .3rem 0; }
  .lines td { flex: 1 1 40%; border: 0; padding: 0; } .lines td:last-child { flex-basis: 100%; color: var(--soft); }
  .sorted tr:has(.long) { display: flex; flex-wrap: wrap; width: calc(100vw - 2rem); border-bottom: 1px solid var(--line); }
  .sorted tr:has(.long) td { border: 0; } .sorted tr:has(.long) .long { flex: 1 0 100%; min-width: 0; } }
.side { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(220px, 100%), 1fr)); gap: 1rem; }
"""
