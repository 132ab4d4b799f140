// The controls of a watched run.

function watch(runs) {
  const controls = Object.fromEntries(["run", "metric", "operand", "filter", "layer", "step"].map((id) => [id, $(id)]));
  const view = { run: runs[0], metric: null, operand: "x", rows: [], layer: 0, column: 0, step: 0, choose };
  view.grid = () => view.run.grids[view.metric.key][view.metric.operands ? view.operand : "layer"];

  const offer = (select, pairs, chosen) => {
    select.replaceChildren(...pairs.map(([value, text]) => make("option", { value }, text)));
    select.value = pairs.some(([value]) => String(value) === String(chosen)) ? chosen : pairs[0]?.[0];
  };

  function nearest(column) { // the step with a histogram that is nearest to a column
    const [first, last] = view.run.columns[column], steps = view.run.histograms.steps;
    const distance = (i) => Math.abs(steps[i] - (first + last) / 2);
    return steps.reduce((best, _, i) => (distance(i) < distance(best) ? i : best), 0);
  }

  function choose(layer, column, step = nearest(column)) {
    [view.layer, view.column, view.step] = [layer, column, step];
    [controls.layer.value, controls.step.value] = [layer, step];
    heat.move();
    bars.show();
  }

  function filter() {
    const words = controls.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (name) => words.every((word) => name.toLowerCase().includes(word));
    view.rows = [...view.run.layers.keys()].filter((i) => fits(view.run.layers[i].name));
    $("shown").textContent = `${view.rows.length} of ${view.run.layers.length} layers`;
    for (const row of document.querySelectorAll("tr[data-layer]")) row.hidden = words.length > 0 && !fits(row.dataset.layer);
    offer(controls.layer, view.rows.map((i) => [i, view.run.layers[i].name]), view.layer);
    heat.show();
    if (view.rows.length) choose(view.rows.includes(view.layer) ? view.layer : view.rows[0], view.column);
  }

  function setMetric() {
    view.metric = data.metrics.find((metric) => metric.key === controls.metric.value);
    controls.operand.disabled = !view.metric.operands;
    const known = Object.keys(view.run.grids[view.metric.key]).map((key) => [key, data.operands[key]]);
    if (view.metric.operands) offer(controls.operand, known, view.operand);
    view.operand = controls.operand.value || "x";
  }

  function setRun() {
    view.run = runs[controls.run.value];
    const known = data.metrics.filter((metric) => view.run.grids[metric.key]);
    const telling = known.find((metric) => Object.values(view.run.grids[metric.key]).some((grid) => grid.low < grid.high));
    offer(controls.metric, known.map((metric) => [metric.key, metric.label]), view.metric?.key ?? telling?.key);
    offer(controls.step, view.run.histograms.steps.map((step, i) => [i, step]), 0);
    setMetric();
  }

  /* In the table of events, the name of a layer becomes a button that shows the layer at that step. */
  function link(row) {
    const run = runs.findIndex((each) => each.name === row.dataset.run), { layer, step } = row.dataset;
    const at = runs[run]?.layers.findIndex((each) => each.name === layer) ?? -1;
    const cell = [...row.cells].find((each) => each.textContent === layer);
    if (at < 0 || !cell) return;
    const show = () => {
      controls.filter.value = "";
      if (controls.run.value !== String(run)) { controls.run.value = run; setRun(); }
      view.layer = at;
      filter();
      choose(at, Math.max(view.run.columns.findLastIndex(([first]) => first <= step), 0));
      $("heat").querySelector(".plot").focus();
    };
    cell.replaceChildren(make("button", { type: "button", class: "link", onclick: show }, layer));
  }

  offer(controls.run, runs.map((run, i) => [i, run.name]), 0);
  setRun();
  const heat = heatMap($("heat"), view), bars = histogram($("histogram"), view);
  const open = () => { // at the worst cell of the worst operand
    const grids = view.run.grids[view.metric.key], wrong = (grid) => decode(grid.codes, Uint16Array).includes(WRONG);
    const rank = (name) => (wrong(grids[name]) ? Infinity : view.metric.worst === "lowest" ? -grids[name].low : grids[name].high);
    const worst = Object.keys(grids).reduce((best, name) => (rank(name) > rank(best) ? name : best));
    if (view.metric.operands) view.operand = controls.operand.value = worst;
    [view.layer, view.column] = heat.worst();
    filter();
  };
  controls.run.addEventListener("change", () => { setRun(); open(); });
  controls.metric.addEventListener("change", () => { setMetric(); filter(); });
  controls.operand.addEventListener("change", () => { view.operand = controls.operand.value; filter(); });
  controls.filter.addEventListener("input", filter);
  controls.layer.addEventListener("change", () => choose(Number(controls.layer.value), view.column, view.step));
  controls.step.addEventListener("change", () => {
    const step = view.run.histograms.steps[controls.step.value];
    const column = view.run.columns.findIndex(([first, last]) => first <= step && step <= last);
    choose(view.layer, column, Number(controls.step.value));
  });
  open();
  for (const row of document.querySelectorAll("tr[data-step]")) link(row);
  return heat.forget;
}
