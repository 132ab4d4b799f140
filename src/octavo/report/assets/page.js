/* Draws the charts of a page with uPlot, from the JSON block "data" that octavo.report writes.
 *
 *   lines(figure, chart)   the charts of every page: octavo.report.page.LineChart
 *   watch(runs)            of a watched run: a heat map of layers and steps, and the histogram of the chosen cell
 *
 * Each chart takes the keyboard (arrow keys), says the values at its cursor below it, and shows its data as a table.
 */
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const plots = []; // every chart, to draw again in another theme
  const DASHES = [[], [8, 4], [2, 3], [12, 3, 2, 3], [5, 5], [1, 5]];
  const VIRIDIS = ["440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725"];
  const MISSING = 65535, WRONG = 65534, LAST = 65533; // codes of a grid: no value, inf or NaN, the largest value

  // ---- small things

  const $ = (id) => document.getElementById(id);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  function number(x, unit = "") {
    if (x === null || x === undefined) return "none";
    if (unit === "share") return `${x !== 0 && x < 1e-6 ? Number((100 * x).toPrecision(3)).toExponential() : Number((100 * x).toPrecision(3))} %`;
    const size = Math.abs(x);
    const text = size && (size < 1e-3 || size >= 1e7) ? String(Number(x.toPrecision(4)).toExponential()) : x.toLocaleString("en-US", { maximumSignificantDigits: 6 });
    return unit ? `${text} ${unit}` : text;
  }

  function decode(text, Kind) {
    const raw = atob(text), bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    return new Kind(bytes.buffer);
  }

  function short(name, most = 26) { // the end of a layer's name says more than its beginning
    return name.length > most ? `…${name.slice(1 - most)}` : name;
  }

  function axis(label, more = {}) {
    const style = { stroke: () => css("--ink"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { stroke: () => css("--line"), width: 1 } };
    return { label, labelSize: 22, size: 62, font: "12px system-ui", labelFont: "12px system-ui", ...style, ...more };
  }

  /* Put a uPlot into `box` that is as wide as the box, also when the window changes. */
  function plot(box, height, options, values) {
    const size = () => ({ width: Math.max(box.clientWidth, 240), height: typeof height === "function" ? height() : height });
    const made = new uPlot({ ...size(), legend: { show: false }, ...options }, values, box);
    new ResizeObserver(() => made.width === size().width || made.setSize(size())).observe(box);
    plots.push(made);
    return made;
  }

  /* The parts of every chart: the box of the plot, the values at the cursor, and the data as a table. */
  function parts(figure, label, keys, rows) {
    const box = make("div", { class: "plot", tabindex: 0, role: "application", "aria-label": label });
    const readout = make("p", { class: "readout", "aria-live": "polite" });
    const wide = make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": `${label}: table` });
    const details = make("details", {}, make("summary", {}, "The data as a table"), wide);
    const fill = () => {
      if (!details.open) return;
      const [head, ...body] = rows();
      const table = make("table", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text))));
      for (const row of body) table.append(make("tr", {}, ...row.map((text) => make("td", {}, text))));
      wide.replaceChildren(table);
    };
    details.addEventListener("toggle", fill);
    box.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey || !keys(event.key)) return;
      event.preventDefault();
    });
    figure.append(box, readout, details);
    return { box, readout, fill };
  }

  // ---- lines

  function lines(figure, chart) {
    const values = uPlot.join(chart.lines.map((line) => [line.x, line.y]));
    const at = (i) => (chart.names.length ? chart.names[values[0][i]] : `${chart.x_label} ${number(values[0][i])}`);
    let made = null, cursor = -1;
    const show = (i) => {
      cursor = i;
      made.setCursor({ left: made.valToPos(values[0][i], "x"), top: made.over.clientHeight / 2 });
    };
    const say = (u) => {
      const i = u.cursor.idx;
      if (i === null || i === undefined) return;
      const shown = chart.lines.map((line, k) => [line, values[k + 1][i], u.series[k + 1].show]);
      const texts = shown.filter(([, y, on]) => on && y !== undefined).map(([line, y]) => `${line.name} ${y === null ? "inf or NaN" : number(y)}`);
      const near = chart.marks.filter(([x]) => Math.abs(u.valToPos(x, "x") - u.valToPos(values[0][i], "x")) < 5).slice(0, 3);
      readout.textContent = [`${at(i)}:`, texts.join(", "), ...near.map(([, text]) => `– ${text}`)].join(" ");
    };
    const keys = (key) => {
      const last = values[0].length - 1, far = Math.max(1, Math.round(last / 20));
      const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -far, PageDown: far, Home: -Infinity, End: Infinity }[key];
      if (key === "Escape") made.setScale("x", { min: values[0][0], max: values[0][last] });
      else if (step === undefined || last < 0) return false;
      else show(clamp((cursor < 0 && step === 1 ? -1 : cursor) + step, 0, last));
      return true;
    };
    const rows = () => [
      [chart.names.length ? "" : chart.x_label, ...chart.lines.map((line) => line.name)],
      ...values[0].map((x, i) => [chart.names.length ? chart.names[x] : String(x), ...chart.lines.map((_, k) => (values[k + 1][i] === undefined ? "" : number(values[k + 1][i])))]),
    ];
    const legend = make("div", { class: "legend" });
    figure.append(legend);
    const label = `${chart.title}: ${chart.lines.map((line) => line.name).join(", ")}. Left and right arrow keys move the cursor.`;
    const { box, readout } = parts(figure, label, keys, rows);
    const style = (line) => {
      const stroke = () => css(`--series-${line.colour % 6}`);
      const points = { show: chart.points || line.dashed || line.x.length < 40, size: 6, fill: stroke };
      const dash = line.dashed ? [3, 3] : DASHES[line.colour % 6];
      return { label: line.name, stroke, width: 1.6, dash, points, spanGaps: true, ...(chart.points ? { paths: () => null } : {}) };
    };
    const names = { values: (u, splits) => splits.map((x) => (Number.isInteger(x) ? short(chart.names[x] ?? "", 14) : "")), space: 110 };
    made = plot(box, 260, {
      series: [{}, ...chart.lines.map(style)],
      scales: { x: { time: false } },
      axes: [axis(chart.names.length ? "" : chart.x_label, { size: 34, ...(chart.names.length ? names : {}) }), axis(chart.y_label, { values: (u, all) => all.map((y) => number(y)) })],
      cursor: { drag: { x: true, y: false }, y: false, ...(chart.cursors ? { sync: { key: chart.cursors, setSeries: false } } : {}) },
      hooks: { setCursor: [say], draw: [(u) => marks(u, chart.marks)] },
    }, values);
    for (const [k, line] of chart.lines.entries()) {
      const key = make("span", { class: line.dashed ? "key dashed" : "key" });
      key.style.borderColor = `var(--series-${line.colour % 6})`;
      const toggle = (event) => {
        made.setSeries(k + 1, { show: !made.series[k + 1].show });
        event.currentTarget.setAttribute("aria-pressed", made.series[k + 1].show);
      };
      legend.append(make("button", { type: "button", "aria-pressed": "true", onclick: toggle }, key, line.name));
    }
  }

  function marks(u, places) { // events: triangles on the x axis
    const bottom = u.bbox.top + u.bbox.height, size = 5 * devicePixelRatio;
    u.ctx.fillStyle = css("--wrong");
    for (const [x] of places) {
      const left = u.valToPos(x, "x", true);
      if (left < u.bbox.left || left > u.bbox.left + u.bbox.width) continue;
      u.ctx.beginPath();
      u.ctx.moveTo(left, bottom - 2 * size);
      u.ctx.lineTo(left - size, bottom);
      u.ctx.lineTo(left + size, bottom);
      u.ctx.fill();
    }
  }

  // ---- a watched run

  const ramp = (() => { // 256 colours, [r, g, b]
    const stops = VIRIDIS.map((hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));
    return Array.from({ length: 256 }, (_, i) => {
      const place = (i / 255) * (stops.length - 1), k = Math.min(Math.floor(place), stops.length - 2);
      return stops[k].map((c, j) => Math.round(c + (place - k) * (stops[k + 1][j] - c)));
    });
  })();

  const colour = (name) => css(name).match(/[0-9a-f]{2}/gi).map((hex) => parseInt(hex, 16));

  function value(grid, metric, code) {
    if (code >= WRONG) return null;
    if (!metric.log) return grid.low + (code / LAST) * (grid.high - grid.low);
    return code === 0 ? 0 : grid.low * Math.pow(grid.high / grid.low, (code - 1) / (LAST - 1));
  }

  function watch(runs) {
    const decoded = new Map(); // base64 text to array: a grid is decoded when it is first shown
    const array = (text, Kind) => decoded.get(text) ?? decoded.set(text, decode(text, Kind)).get(text);
    const state = { run: runs[0], metric: null, operand: "x", rows: [], layer: 0, column: 0, step: 0 };
    const controls = Object.fromEntries(["run", "metric", "operand", "filter", "layer", "step"].map((id) => [id, $(id)]));
    const options = (select, pairs, chosen) => {
      select.replaceChildren(...pairs.map(([key, text]) => make("option", { value: key }, text)));
      select.value = pairs.some(([key]) => String(key) === String(chosen)) ? chosen : pairs[0]?.[0];
    };
    const metricOf = (key) => data.metrics.find((metric) => metric.key === key);
    const grid = () => state.run.grids[state.metric.key][state.metric.operands ? state.operand : "layer"];
    const code = (layer, column) => array(grid().codes, Uint16Array)[layer * state.run.columns.length + column];
    const span = (column) => {
      const [first, last] = state.run.columns[column];
      return first === last ? `step ${first}` : `steps ${first} to ${last}`;
    };
    const cell = (layer, column) => {
      const found = code(layer, column);
      const text = found === WRONG ? "inf or NaN" : number(value(grid(), state.metric, found), state.metric.unit);
      const [first, last] = state.run.columns[column];
      const kind = first === last || found >= WRONG ? "" : ` (the ${state.metric.worst} of the samples)`;
      return `${state.run.layers[layer].name}, ${span(column)}: ${state.metric.label} ${text}${kind}`;
    };

    // the heat map

    const heat = parts($("heat"), "Heat map of layers and steps. Arrow keys move the cell; Page Up, Page Down, Home and End go further.", (key) => {
      const row = state.rows.indexOf(state.layer), last = state.run.columns.length - 1;
      const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -Infinity], End: [0, Infinity] }[key] ?? [];
      if (down === undefined || !state.rows.length) return false;
      choose(state.rows[clamp(row + down, 0, state.rows.length - 1)], clamp(state.column + right, 0, last));
      return true;
    }, () => [["layer", ...state.run.columns.map((_, column) => span(column))], ...state.rows.map((layer) => [
      state.run.layers[layer].name, ...state.run.columns.map((_, column) => (code(layer, column) === WRONG ? "inf or NaN" : number(value(grid(), state.metric, code(layer, column)), state.metric.unit)))])]);
    const scale = make("div", { class: "scale" });
    $("heat").prepend(scale);
    let map = null, image = null;

    /* The cells as an image with at most one pixel for each pixel of the plot; a pixel of several cells shows the worst. */
    function paint(u) {
      const columns = state.run.columns.length, rows = state.rows.length;
      const width = Math.min(columns, Math.floor(u.bbox.width)), height = Math.min(rows, Math.floor(u.bbox.height));
      const codes = array(grid().codes, Uint16Array), lowest = state.metric.worst === "lowest";
      const pixels = new Int32Array(width * height).fill(-1);
      for (let r = 0; r < rows; r++) {
        const above = Math.floor((r * height) / rows) * width, start = state.rows[r] * columns;
        for (let c = 0; c < columns; c++) {
          const found = codes[start + c];
          if (found === MISSING) continue;
          const at = above + Math.floor((c * width) / columns), old = pixels[at];
          if (old < 0 || found === WRONG || (old !== WRONG && (lowest ? found < old : found > old))) pixels[at] = found;
        }
      }
      const canvas = make("canvas", { width, height }), context = canvas.getContext("2d");
      const drawn = context.createImageData(width, height), [empty, wrong] = [colour("--empty"), colour("--wrong")];
      for (let i = 0; i < pixels.length; i++) {
        const found = pixels[i];
        const rgb = found < 0 ? empty : found === WRONG ? wrong : ramp[Math.round((255 * found) / LAST)];
        drawn.data.set(rgb, 4 * i);
        drawn.data[4 * i + 3] = 255;
      }
      context.putImageData(drawn, 0, 0);
      return canvas;
    }

    function sayCell(hovered = null) {
      const none = "No layer has these words in its name.";
      heat.readout.textContent = state.rows.length ? cell(...(hovered ?? [state.layer, state.column])) : none;
    }

    function drawHeat(u) {
      if (!state.rows.length) return;
      const { ctx, bbox } = u, columns = state.run.columns.length;
      image ??= paint(u);
      ctx.save();
      ctx.imageSmoothingEnabled = false;
      ctx.drawImage(image, bbox.left, bbox.top, bbox.width, bbox.height);
      const row = state.rows.indexOf(state.layer), width = bbox.width / columns, height = bbox.height / state.rows.length;
      const box = [bbox.left + state.column * width - 1, bbox.top + row * height - 1, Math.max(width, 4) + 2, Math.max(height, 4) + 2];
      for (const [style, line] of [["#000", 5], ["#fff", 2]]) { // seen on every colour
        ctx.strokeStyle = style;
        ctx.lineWidth = line * devicePixelRatio / 2;
        if (row >= 0) ctx.strokeRect(...box);
      }
      ctx.restore();
    }

    function hovered(u) {
      const { left, top } = u.cursor;
      if (left < 0 || !state.rows.length) return null;
      const column = Math.floor(u.posToVal(left, "x")), row = Math.floor(u.posToVal(top, "y"));
      return state.rows[row] !== undefined && state.run.columns[column] ? [state.rows[row], column] : null;
    }

    const tall = () => clamp(state.rows.length * 14, 120, Math.max(420, Math.min(state.rows.length, 900))) + 60;
    function makeHeat() {
      const columns = () => state.run.columns.length, rows = () => Math.max(state.rows.length, 1);
      const narrow = heat.box.clientWidth < 600;
      const names = (u, middles) => middles.map((y) => short(state.run.layers[state.rows[y - 0.5]]?.name ?? "", narrow ? 12 : 26));
      const steps = (u, middles) => middles.map((x) => String(state.run.columns[x - 0.5]?.[0] ?? ""));
      const whole = { // marks in the middle of cells
        incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500],
        splits: (u, axis, low, high, every) => Array.from({ length: Math.ceil((high - low) / every) }, (_, i) => low + i * every + 0.5),
        grid: { show: false },
      };
      map = plot(heat.box, tall, {
        series: [{}, { paths: () => null, points: { show: false } }],
        scales: { x: { time: false, range: () => [0, columns()] }, y: { range: () => [0, rows()], dir: -1 } },
        axes: [axis("step", { ...whole, values: steps, size: 34 }), axis("", { ...whole, values: names, size: narrow ? 90 : 190, labelSize: 0, space: 16 })],
        cursor: { drag: { x: false, y: false }, points: { show: false } },
        hooks: {
          draw: [drawHeat],
          setSize: [() => { image = null; }],
          setCursor: [(u) => sayCell(hovered(u))],
        },
      }, [[0, 1], [0, 1]]);
      map.over.addEventListener("click", () => { const found = hovered(map); if (found) choose(...found); });
    }

    function drawScale() {
      const { low, high } = grid(), bar = make("span", { class: "ramp" });
      bar.style.background = `linear-gradient(to right, ${VIRIDIS.map((hex) => `#${hex}`).join(",")})`;
      const key = (name, text) => {
        const box = make("span", { class: "box" });
        box.style.background = `var(${name})`;
        return [box, text];
      };
      const start = state.metric.log && grid().zero ? "0, then " : "";
      scale.replaceChildren(start + number(low, state.metric.unit), bar, number(high, state.metric.unit) + (state.metric.log ? " (logarithmic)" : ""),
        ...key("--empty", "no value"), ...key("--wrong", "inf or NaN"));
    }

    // the histogram of the chosen layer, operand and step

    let bars = null, code_points = null;
    const histogram = () => {
      const { histograms, layers } = state.run, operand = state.metric.operands ? state.operand : "gradient";
      const part = histograms.operands[operand];
      if (!part) return null;
      const at = state.step * layers.length + state.layer, size = data.binades;
      const amax = array(part.amax, Float32Array)[at];
      const shares = [...array(part.shares, Uint16Array).subarray(at * size, (at + 1) * size)].map((share) => share / 65535);
      const scales = part.scale ? [array(part.scale, Float32Array)[at], array(part.smallest_scale, Float32Array)[at]] : [NaN, NaN];
      const format = layers[state.layer].formats[operand];
      return { amax, shares, scales, format, points: data.formats[format], operand };
    };
    const binade = (found, k) => (k === data.binades - 1 ? `up to ${number(found.amax * 2 ** -k)}` : `${number(found.amax * 2 ** -(k + 1))} to ${number(found.amax * 2 ** -k)}`);
    let bar = 0;
    const chart = parts($("histogram"), "Histogram of the magnitudes of a tensor. Left and right arrow keys move from bar to bar.", (key) => {
      const step = { ArrowLeft: 1, ArrowRight: -1, Home: Infinity, End: -Infinity }[key];
      if (step === undefined) return false;
      bar = clamp(bar + step, 0, data.binades - 1);
      sayBar();
      return true;
    }, () => {
      const found = histogram();
      return [["magnitude", "share of the elements"], ...(found ? found.shares.map((share, k) => [binade(found, k), number(share, "share")]) : [])];
    });
    const sayBar = () => {
      const found = histogram();
      if (found && found.amax > 0) chart.readout.textContent = `${binade(found, bar)}: ${number(found.shares[bar], "share")} of the elements`;
    };

    function drawPoints(u) { // the numbers of the format: one row of ticks for the largest scale, one for the smallest
      if (!code_points) return;
      const { ctx, bbox } = u, { points, scales } = code_points;
      const x = (v) => clamp(u.valToPos(Math.log2(v), "x", true), bbox.left, bbox.left + bbox.width);
      ctx.save();
      ctx.globalAlpha = 0.13;
      ctx.fillStyle = css("--wrong");
      const high = x(points[points.length - 1] * scales[0]), low = x((points[0] / 2) * scales[1]);
      ctx.fillRect(high, bbox.top, bbox.left + bbox.width - high, bbox.height);
      ctx.fillRect(bbox.left, bbox.top, low - bbox.left, bbox.height);
      ctx.globalAlpha = 1;
      ctx.lineWidth = devicePixelRatio;
      const tick = 14 * devicePixelRatio;
      [...new Set(scales)].forEach((scale, row) => {
        ctx.strokeStyle = css(row ? "--series-2" : "--series-1");
        ctx.beginPath();
        for (const point of points) {
          const left = u.valToPos(Math.log2(point * scale), "x", true);
          if (left < bbox.left || left > bbox.left + bbox.width) continue;
          ctx.moveTo(left, bbox.top + (row + 0.1) * tick);
          ctx.lineTo(left, bbox.top + (row + 0.9) * tick);
        }
        ctx.stroke();
      });
      ctx.restore();
    }

    function drawHistogram() {
      const found = histogram(), caption = $("histogram-caption");
      const step = state.run.histograms.steps[state.step], name = state.run.layers[state.layer].name;
      const empty = !found || !(found.amax > 0) || !Number.isFinite(found.amax);
      const xs = [], ys = [];
      if (!empty) found.shares.forEach((share, k) => { xs.unshift(Math.log2(found.amax) - k - 0.5); ys.unshift(share > 0 ? share : null); });
      const scaled = !empty && found.points && found.scales.every((scale) => scale > 0 && Number.isFinite(scale));
      code_points = scaled ? found : null;
      const reach = scaled ? Math.log2(found.points[found.points.length - 1] * found.scales[0]) : -Infinity;
      const first = xs[ys.findIndex((y) => y !== null)];
      const smallest = scaled ? Math.log2(found.points[0] * found.scales[1]) : Infinity;
      range = empty ? [0, 1] : [Math.floor(Math.min(first, smallest) - 2), Math.ceil(Math.max(xs[xs.length - 1], reach) + 2)];
      bars.setData([xs, ys]);
      const what = `${name}, ${found ? found.operand : state.operand} at step ${step}: `;
      if (empty) caption.textContent = `${what}no value that is finite and not zero was recorded.`;
      else {
        const scales = scaled ? `in ${found.format}, scales ${[...new Set(found.scales)].map((s) => number(s)).join(" down to ")}. The ticks are the numbers of the format times ${found.scales[0] === found.scales[1] ? "the scale" : "the largest scale, and below it times the smallest"}; shaded: larger ones are clipped, smaller ones become 0.` : `${found.format ? `in ${found.format}` : ""}: not quantized here.`;
        caption.textContent = `${what}amax ${number(found.amax)}, ${scales}`;
      }
      bar = ys.length ? data.binades - 1 - ys.findLastIndex((y) => y !== null) : 0;
      chart.readout.textContent = "";
      chart.fill();
    }

    let range = [0, 1];
    function makeHistogram() {
      bars = plot(chart.box, 280, {
        series: [{}, { stroke: () => css("--series-0"), fill: () => css("--series-0"), paths: uPlot.paths.bars({ size: [0.9, Infinity] }), points: { show: false } }],
        scales: { x: { time: false, range: () => range }, y: { distr: 3, range: () => [1e-5, 1] } },
        axes: [axis("magnitude", { values: (u, all) => all.map((x) => (Number.isInteger(x) ? `2^${x}` : "")), size: 34 }), axis("share of the elements", { splits: () => [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1], filter: (u, all) => all, values: (u, all) => all.map((y) => number(y, "share")) })],
        cursor: { y: false, drag: { x: false, y: false } },
        hooks: {
          draw: [drawPoints],
          setCursor: [(u) => { if (u.cursor.idx !== null && u.cursor.idx !== undefined && u.cursor.left >= 0) { bar = data.binades - 1 - u.cursor.idx; sayBar(); } }],
        },
      }, [[], []]);
    }

    // choosing

    function worst() { // the layer and column that the page opens at
      const codes = array(Object.values(state.run.grids[state.metric.key])[0].codes, Uint16Array), columns = state.run.columns.length;
      let best = columns - 1, value = -1;
      codes.forEach((code, i) => {
        const rank = code === MISSING ? -1 : state.metric.worst === "lowest" && code < WRONG ? LAST - code : code;
        if (rank > value) [best, value] = [i, rank];
      });
      return [Math.floor(best / columns), best % columns];
    }

    function nearest(column) { // the step with a histogram that is nearest to a column
      const middle = (state.run.columns[column][0] + state.run.columns[column][1]) / 2, steps = state.run.histograms.steps;
      return steps.reduce((best, step, i) => (Math.abs(step - middle) < Math.abs(steps[best] - middle) ? i : best), 0);
    }

    function choose(layer, column, step = nearest(column)) {
      [state.layer, state.column, state.step] = [layer, column, step];
      controls.layer.value = layer;
      controls.step.value = state.step;
      sayCell();
      map.redraw(false);
      drawHistogram();
    }

    function filter() {
      const words = controls.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      const fits = (name) => words.every((word) => name.toLowerCase().includes(word));
      state.rows = state.run.layers.map((layer, i) => (fits(layer.name) ? i : -1)).filter((i) => i >= 0);
      $("shown").textContent = `${state.rows.length} of ${state.run.layers.length} layers`;
      for (const row of document.querySelectorAll("tr[data-layer]")) row.hidden = Boolean(words.length) && !fits(row.dataset.layer);
      options(controls.layer, state.rows.map((i) => [i, state.run.layers[i].name]), state.layer);
      image = null;
      map.setSize({ width: map.width, height: tall() });
      map.setData([[0, 1], [0, 1]]); // sets the scales anew
      heat.fill();
      if (state.rows.length) choose(state.rows.includes(state.layer) ? state.layer : state.rows[0], state.column);
      else sayCell();
    }

    function setMetric() {
      state.metric = metricOf(controls.metric.value);
      controls.operand.disabled = !state.metric.operands;
      const operands = Object.keys(state.run.grids[state.metric.key]);
      if (state.metric.operands) options(controls.operand, operands.map((key) => [key, data.operands[key]]), state.operand);
      state.operand = controls.operand.value || "x";
      drawScale();
      filter();
    }

    function setRun() {
      state.run = runs[controls.run.value];
      const known = data.metrics.filter((metric) => state.run.grids[metric.key]);
      options(controls.metric, known.map((metric) => [metric.key, metric.label]), state.metric?.key);
      options(controls.step, state.run.histograms.steps.map((step, i) => [i, step]), 0);
      state.metric = metricOf(controls.metric.value);
      [state.layer, state.column] = worst();
      setMetric();
    }

    options(controls.run, runs.map((run, i) => [i, run.name]), 0);
    state.metric = metricOf(Object.keys(runs[0].grids)[0]);
    makeHeat();
    makeHistogram();
    controls.run.addEventListener("change", setRun);
    controls.metric.addEventListener("change", setMetric);
    controls.operand.addEventListener("change", () => { state.operand = controls.operand.value; setMetric(); });
    controls.filter.addEventListener("input", filter);
    controls.layer.addEventListener("change", () => choose(Number(controls.layer.value), state.column));
    controls.step.addEventListener("change", () => {
      const step = state.run.histograms.steps[controls.step.value];
      choose(state.layer, state.run.columns.findIndex(([first, last]) => first <= step && step <= last), Number(controls.step.value));
    });
    setRun();
    return () => { image = null; };
  }

  // ---- the page

  for (const chart of data.charts) lines($(chart.id), chart);
  const forget = data.watched?.length ? watch(data.watched) : () => {};
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    forget();
    for (const made of plots) made.redraw();
  });
  requestAnimationFrame(() => setTimeout(() => { document.documentElement.dataset.drawn = Math.round(performance.now()); }));
})();
