// Draws the page when it has loaded.

for (const chart of data.charts) drawLines($(chart.id), chart);
const forget = data.watched ? watch(data.watched) : () => {};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  forget();
  for (const made of plots) made.redraw();
});
requestAnimationFrame(() => setTimeout(() => { document.documentElement.dataset.drawn = Math.round(performance.now()); }));
