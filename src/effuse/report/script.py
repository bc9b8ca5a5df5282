"""The script of pages that have a slider, tooltips and sorted tables. It only reads its own page."""

SCRIPT = """
'use strict';
const all = (what, inside) => Array.from((inside || document).querySelectorAll(what));
const tip = document.createElement('div');
tip.id = 'tip'; tip.hidden = true; tip.setAttribute('aria-hidden', 'true'); document.body.append(tip);
function say(words, x, y) {
  tip.textContent = words; tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 12, innerWidth - box.width - 4)) + 'px';
  tip.style.top = (y - box.height - 12 < 4 ? y + 16 : y - box.height - 12) + 'px';
}
function hush() { tip.hidden = true; }
all('svg.chart[data-points]').forEach(svg => {
  const points = JSON.parse(svg.dataset.points), mark = svg.querySelector('.mark');
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    let best = null, least = Infinity;
    points.forEach(p => { const d = (p[0] - x) ** 2 + ((p[1] - y) / 4) ** 2; if (d < least) { least = d; best = p; } });
    if (!best) return;
    mark.setAttribute('cx', best[0]); mark.setAttribute('cy', best[1]); mark.removeAttribute('visibility');
    say(best[2], event.clientX, event.clientY);
  });
  svg.addEventListener('pointerleave', () => { mark.setAttribute('visibility', 'hidden'); hush(); });
});
all('input[type=range][data-for]').forEach(slider => {
  const figures = all('figure', document.getElementById(slider.dataset.for));
  const told = document.getElementById(slider.id + '-told');
  const show = () => {
    figures.forEach(figure => { figure.hidden = figure.dataset.step !== slider.value; });
    const shown = figures.filter(figure => !figure.hidden);
    told.textContent = shown.length ? shown[0].dataset.name : '';
    slider.setAttribute('aria-valuetext', told.textContent);
  };
  slider.addEventListener('input', show); show();
});
all('.axis input').forEach(radio => radio.addEventListener('change', () => {
  radio.closest('section').dataset.axis = radio.value;
}));
all('table.sorted').forEach(table => all('th', table).forEach((head, column) => {
  const button = document.createElement('button');
  button.textContent = head.textContent; head.textContent = ''; head.append(button);
  button.addEventListener('click', () => {
    const up = head.getAttribute('aria-sort') !== 'ascending', body = table.tBodies[0];
    all('th', table).forEach(other => other.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
    const value = row => row.cells[column].dataset.v ?? row.cells[column].textContent;
    const order = (a, b) => {
      const p = value(a), q = value(b), x = parseFloat(p), y = parseFloat(q);
      if (isNaN(x) || isNaN(y)) return isNaN(x) && isNaN(y) ? p.localeCompare(q) * (up ? 1 : -1) : isNaN(x) - isNaN(y);
      return (x - y) * (up ? 1 : -1);
    };
    Array.from(body.rows).sort(order).forEach(row => body.append(row));
  });
}));
all('details[data-raw]').forEach(details => {
  const raw = document.getElementById(details.dataset.raw), link = details.querySelector('a');
  details.addEventListener('toggle', () => {
    if (!details.open || link.href) return;
    details.querySelector('pre').textContent = JSON.stringify(JSON.parse(raw.textContent), null, 1).slice(0, 200000);
    link.href = URL.createObjectURL(new Blob([raw.textContent], {type: 'application/json'}));
  });
});
"""
