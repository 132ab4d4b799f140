// The charts of lines.

function drawLines(figure, chart) {
  const values = uPlot.join(chart.lines.map((line) => [line.x, line.y])), last = values[0].length - 1;
  const named = chart.names.length > 0;
  const at = (i) => (named ? chart.names[values[0][i]] : `${chart.x_label} ${number(values[0][i])}`);
  const text = (y) => (y === undefined ? "" : y === null ? NO_NUMBER : number(y));
  const shown = chart.lines.map(() => true);
  let made = null, cursor = -1;

  const say = (u) => {
    const i = u.cursor.idx;
    if (i === null || i === undefined) return;
    const left = u.valToPos(values[0][i], "x");
    const here = chart.lines.map((line, k) => [line.name, shown[k] ? values[k + 1][i] : undefined]);
    const texts = here.filter(([, y]) => y !== undefined).map(([name, y]) => `${name} ${text(y)}`);
    const near = chart.marks.filter(([x]) => Math.abs(u.valToPos(x, "x") - left) < 5).slice(0, 3);
    readout.textContent = [`${at(i)}:`, texts.join(", "), ...near.map((mark) => `– ${mark[1]}`)].join(" ");
  };
  const press = (key) => {
    const far = Math.max(1, Math.round(last / 20));
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -far, PageDown: far, Home: -Infinity, End: Infinity };
    if (key === "Escape") made.setData(values); // sets the scales anew
    if (!(key in steps) || last < 0) return key === "Escape";
    cursor = clamp(cursor + steps[key], 0, last);
    made.setCursor({ left: made.valToPos(values[0][cursor], "x"), top: made.over.clientHeight / 2 });
    return true;
  };
  const rows = () => [
    [named ? "" : chart.x_label, ...chart.lines.map((line) => line.name)],
    ...values[0].map((x, i) => [named ? chart.names[x] : String(x), ...chart.lines.map((_, k) => text(values[k + 1][i]))]),
  ];
  const series = (line, k) => {
    const stroke = () => css(`--series-${line.colour % 6}`), alone = chart.points ? { paths: () => null } : {};
    const edge = chart.bands.some((pair) => pair.includes(k)); // of a band: no line of its own
    const points = { show: !edge && (chart.points || line.dashed || line.x.length < 40), size: 6, fill: stroke };
    return { show: shown[k], stroke, width: edge ? 0.5 : 1.6, dash: line.dashed ? [3, 3] : DASHES[(line.colour + Math.floor(line.colour / 6)) % 6], points, ...alone };
  };

  const legend = make("div", { class: "legend" });
  figure.append(legend);
  const label = `${chart.title}: ${chart.lines.map((line) => line.name).join(", ")}. Arrow keys move the cursor.`;
  const { box, readout } = parts(figure, label, press, rows);
  const names = { values: (u, all) => shorten(all.map((x) => chart.names[x] ?? ""), 20), space: 140 };
  const sync = chart.cursors ? { sync: { key: chart.cursors, setSeries: false } } : {};
  const range = (u, low, high) => [Math.min(0, 1.1 * low), Math.max(0, 1.1 * high)]; // of an axis that has 0
  const build = (distr) => { // 1: a linear y axis, 3: a logarithmic one
    made?.destroy();
    made = plot(box, () => 260, {
      series: [{}, ...chart.lines.map(series)],
      scales: { x: { time: false }, y: { distr, ...(chart.zero && distr === 1 ? { range } : {}) } },
      bands: chart.bands.map(([high, low]) => ({ series: [high + 1, low + 1], fill: () => `${css(`--series-${chart.lines[high].colour % 6}`)}33` })),
      axes: [
        axis(named ? "" : chart.x_label, { size: 34, ...(named ? names : {}) }),
        axis(chart.y_label, { values: (u, all) => all.map((y) => (y === null ? "" : number(y))), size: 70 }),
      ],
      cursor: { drag: { x: true, y: false }, y: false, ...sync },
      hooks: { setCursor: [say], draw: [(u) => drawMarks(u, chart.marks)] },
    }, values);
  };
  build(1);

  for (const [k, line] of chart.lines.entries()) {
    const key = make("span", { class: line.dashed ? "key dashed" : "key" });
    key.style.borderColor = `var(--series-${line.colour % 6})`;
    const toggle = (event) => {
      shown[k] = !shown[k];
      made.setSeries(k + 1, { show: shown[k] });
      event.currentTarget.setAttribute("aria-pressed", shown[k]);
    };
    legend.append(make("button", { type: "button", "aria-pressed": "true", onclick: toggle }, key, line.name));
  }
  if (chart.lines.every((line) => line.y.every((y) => y === null || y > 0))) {
    const box = make("input", { type: "checkbox", onchange: (event) => build(event.currentTarget.checked ? 3 : 1) });
    legend.append(make("label", {}, box, " logarithmic"));
  }
}

function drawMarks(u, marks) { // events: triangles on the x axis
  const bottom = u.bbox.top + u.bbox.height, size = 5 * devicePixelRatio;
  u.ctx.fillStyle = css("--wrong");
  for (const [x] of marks) {
    const left = u.valToPos(x, "x", true);
    if (left < u.bbox.left || left > u.bbox.left + u.bbox.width) continue;
    u.ctx.beginPath();
    u.ctx.moveTo(left, bottom - 2 * size);
    u.ctx.lineTo(left - size, bottom);
    u.ctx.lineTo(left + size, bottom);
    u.ctx.fill();
  }
}
