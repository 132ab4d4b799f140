/* Draws the charts of a page with uPlot, from the JSON block "data" that octavo.report writes.
 *
 *   drawLines   the charts of every page: octavo.report.page.LineChart
 *   watch       of watched runs: the controls, a heat map of layers and steps, the histogram of the chosen cell
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
  const NO_NUMBER = "inf or NaN";

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
    const share = unit === "share", y = share ? 100 * x : x, size = Math.abs(y);
    const digits = share ? 3 : 6;
    const small = size && (size < (share ? 1e-4 : 1e-3) || size >= 1e7);
    const options = { maximumSignificantDigits: digits };
    const text = small ? String(Number(y.toPrecision(digits - 2)).toExponential()) : y.toLocaleString("en-US", options);
    return share ? `${text} %` : unit ? `${text} ${unit}` : text;
  }

  function shorten(names, most) { // the number of the block and the end of a layer's name say more than its beginning
    if (names.every((name) => name.length <= most)) return names;
    const tails = names.map((name) => name.replace(/^.*?(?=\d)/, ""));
    return tails.map((tail) => (tail.length > most ? `…${tail.slice(1 - most)}` : tail));
  }

  const decode = (() => { // base64 to an array, when it is first shown
    const known = new Map();
    return (text, Kind) => {
      if (!known.has(text)) {
        const raw = atob(text), bytes = new Uint8Array(raw.length);
        for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
        known.set(text, new Kind(bytes.buffer));
      }
      return known.get(text);
    };
  })();

  // ---- what all charts share

  function axis(label, more = {}) {
    const line = { stroke: () => css("--line"), width: 1 }, font = "12px system-ui";
    return { label, labelSize: 22, size: 62, font, labelFont: font, stroke: () => css("--ink"), grid: line, ticks: line, ...more };
  }

  /* Put a uPlot into `box` that is as wide as the box, also when the window changes. */
  function plot(box, height, options, values) {
    const size = () => ({ width: Math.max(box.clientWidth, 240), height: height() });
    const made = new uPlot({ ...size(), legend: { show: false }, ...options }, values, box);
    const observer = new ResizeObserver(() => made.width === size().width || made.setSize(size()));
    observer.observe(box);
    made.hooks.destroy = [() => { observer.disconnect(); plots.splice(plots.indexOf(made), 1); }];
    plots.push(made);
    return made;
  }

  /* The parts of a chart: the box of the plot, the values at its cursor, and its data as a table.
   *
   * `press` takes the name of a key, and is false for a key that it does not know. `rows` gives the table's texts. */
  function parts(figure, label, press, rows) {
    const box = make("div", { class: "plot", tabindex: 0, role: "application", "aria-label": label });
    const readout = make("p", { class: "readout", "aria-live": "polite" });
    const wide = make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "The data as a table" });
    const details = make("details", {}, make("summary", {}, "The data as a table"), wide);
    const fill = () => {
      if (!details.open) return;
      const [head, ...body] = rows(), table = make("table");
      table.append(make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text))));
      for (const row of body) table.append(make("tr", {}, ...row.map((text) => make("td", {}, text))));
      wide.replaceChildren(table);
    };
    details.addEventListener("toggle", fill);
    box.addEventListener("keydown", (event) => {
      if (!event.ctrlKey && !event.altKey && !event.metaKey && press(event.key)) event.preventDefault();
    });
    figure.append(box, readout, details);
    return { box, readout, fill };
  }

  // ---- lines

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
      const points = { show: chart.points || line.dashed || line.x.length < 40, size: 6, fill: stroke };
      return { show: shown[k], stroke, width: 1.6, dash: line.dashed ? [3, 3] : DASHES[(line.colour + Math.floor(line.colour / 6)) % 6], points, ...alone };
    };

    const legend = make("div", { class: "legend" });
    figure.append(legend);
    const label = `${chart.title}: ${chart.lines.map((line) => line.name).join(", ")}. Arrow keys move the cursor.`;
    const { box, readout } = parts(figure, label, press, rows);
    const names = { values: (u, all) => shorten(all.map((x) => chart.names[x] ?? ""), 20), space: 140 };
    const sync = chart.cursors ? { sync: { key: chart.cursors, setSeries: false } } : {};
    const build = (distr) => { // 1: a linear y axis, 3: a logarithmic one
      made?.destroy();
      made = plot(box, () => 260, {
        series: [{}, ...chart.lines.map(series)],
        scales: { x: { time: false }, y: { distr } },
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

  // ---- the heat map of a watched run. `view` is the state that `watch` holds: what is chosen, and what is shown

  const RAMP = (() => { // 256 colours, [r, g, b]
    const stops = VIRIDIS.map(rgb);
    return Array.from({ length: 256 }, (_, i) => {
      const place = (i / 255) * (stops.length - 1), k = Math.min(Math.floor(place), stops.length - 2);
      return stops[k].map((c, j) => Math.round(c + (place - k) * (stops[k + 1][j] - c)));
    });
  })();

  function rgb(hex) {
    return hex.match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16));
  }

  function heatMap(figure, view) {
    let image = null;
    const columns = () => view.run.columns, codes = () => decode(view.grid().codes, Uint16Array);
    const code = (layer, column) => codes()[layer * columns().length + column];
    const steps = (column) => {
      const [first, last] = columns()[column];
      return first === last ? `step ${first}` : `steps ${first} to ${last}`;
    };
    const text = (found) => {
      const { low, high } = view.grid(), { log, unit } = view.metric;
      if (found >= WRONG) return found === WRONG ? NO_NUMBER : "none";
      if (log) return number(found === 0 ? 0 : low * Math.pow(high / low, (found - 1) / (LAST - 1)), unit);
      return number(low + (found / LAST) * (high - low), unit);
    };
    const cell = (layer, column) => {
      const found = code(layer, column), [first, last] = columns()[column];
      const kind = first === last || found >= WRONG ? "" : ` (the ${view.metric.worst} of the samples)`;
      return `${view.run.layers[layer].name}, ${steps(column)}: ${view.metric.label} ${text(found)}${kind}`;
    };

    const MOVES = { // rows and columns
      ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-10, 0], PageDown: [10, 0],
      ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -Infinity], End: [0, Infinity],
    };
    const press = (key) => {
      if (!(key in MOVES) || !view.rows.length) return false;
      const row = clamp(view.rows.indexOf(view.layer) + MOVES[key][0], 0, view.rows.length - 1);
      view.choose(view.rows[row], clamp(view.column + MOVES[key][1], 0, columns().length - 1));
      return true;
    };
    const rows = () => [
      ["layer", ...columns().map((_, column) => steps(column))],
      ...view.rows.map((layer) => [view.run.layers[layer].name, ...columns().map((_, column) => text(code(layer, column)))]),
    ];
    const scale = make("div", { class: "scale" });
    figure.append(scale);
    const label = "Heat map of layers and steps. Arrow keys move the cell; Page Up, Page Down, Home and End go further.";
    const { box, readout, fill } = parts(figure, label, press, rows);

    /* The cells as an image with at most one pixel for each pixel of the plot; a pixel of several cells shows the worst. */
    function paint(width, height) {
      const found = codes(), count = columns().length, lowest = view.metric.worst === "lowest";
      const worst = new Int32Array(width * height).fill(-1);
      view.rows.forEach((layer, r) => {
        const start = layer * count, row = Math.floor((r * height) / view.rows.length) * width;
        for (let c = 0; c < count; c++) {
          const next = found[start + c], pixel = row + Math.floor((c * width) / count), old = worst[pixel];
          if (next === MISSING || old === WRONG) continue;
          if (old < 0 || next === WRONG || (lowest ? next < old : next > old)) worst[pixel] = next;
        }
      });
      const canvas = make("canvas", { width, height }), context = canvas.getContext("2d");
      const pixels = context.createImageData(width, height), empty = rgb(css("--empty")), wrong = rgb(css("--wrong"));
      worst.forEach((next, i) => {
        const colour = next < 0 ? empty : next === WRONG ? wrong : RAMP[Math.round((255 * next) / LAST)];
        pixels.data.set([...colour, 255], 4 * i);
      });
      context.putImageData(pixels, 0, 0);
      return canvas;
    }

    function draw(u) {
      if (!view.rows.length) return;
      const { ctx, bbox } = u, count = columns().length, row = view.rows.indexOf(view.layer);
      image ??= paint(Math.min(count, Math.floor(bbox.width)), Math.min(view.rows.length, Math.floor(bbox.height)));
      ctx.save();
      ctx.imageSmoothingEnabled = false;
      ctx.drawImage(image, bbox.left, bbox.top, bbox.width, bbox.height);
      const width = bbox.width / count, height = bbox.height / view.rows.length;
      const [left, top] = [bbox.left + view.column * width - 1, bbox.top + row * height - 1];
      for (const [style, line] of [["#000", 2.5], ["#fff", 1]]) { // seen on every colour
        ctx.strokeStyle = style;
        ctx.lineWidth = line * devicePixelRatio;
        ctx.strokeRect(left, top, Math.max(width, 4) + 2, Math.max(height, 4) + 2);
      }
      ctx.restore();
    }

    function hovered(u) {
      const column = Math.floor(u.posToVal(u.cursor.left, "x")), row = Math.floor(u.posToVal(u.cursor.top, "y"));
      return u.cursor.left >= 0 && row in view.rows && column in columns() ? [view.rows[row], column] : null;
    }

    function say(hover = null) {
      const none = "No layer has these words in its name.";
      readout.textContent = view.rows.length ? cell(...(hover ?? [view.layer, view.column])) : none;
    }

    function showScale() {
      const { low, high, zero } = view.grid(), { log, unit } = view.metric, bar = make("span", { class: "ramp" });
      bar.style.background = `linear-gradient(to right, ${VIRIDIS.map((hex) => `#${hex}`).join(",")})`;
      const key = (name, meaning) => {
        const square = make("span", { class: "box" });
        square.style.background = `var(${name})`;
        return [square, meaning];
      };
      const start = log && zero && low > 0 ? "0, then " : "", end = log && low < high ? " (logarithmic)" : "";
      const keys = [...key("--empty", "no value"), ...key("--wrong", NO_NUMBER)];
      scale.replaceChildren(start + number(low, unit), bar, number(high, unit) + end, ...keys);
    }

    const height = () => clamp(view.rows.length * 14, 120, Math.max(420, Math.min(view.rows.length, 900))) + 60;
    const narrow = box.clientWidth < 600;
    const middles = { // marks in the middle of cells
      incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500],
      splits: (u, axis, low, high, every) => Array.from({ length: Math.ceil((high - low) / every) }, (_, i) => low + i * every + 0.5),
      grid: { show: false },
    };
    const names = (u, all) => shorten(all.map((y) => view.run.layers[view.rows[y - 0.5]]?.name ?? ""), narrow ? 12 : 26);
    const made = plot(box, height, {
      series: [{}, { paths: () => null, points: { show: false } }],
      scales: { x: { time: false, range: () => [0, columns().length] }, y: { range: () => [0, Math.max(view.rows.length, 1)], dir: -1 } },
      axes: [
        axis("step", { ...middles, values: (u, all) => all.map((x) => String(columns()[x - 0.5]?.[0] ?? "")), size: 34 }),
        axis("", { ...middles, values: names, size: narrow ? 90 : 190, labelSize: 0, space: 16 }),
      ],
      cursor: { drag: { x: false, y: false }, points: { show: false } },
      hooks: { draw: [draw], setSize: [() => { image = null; }], setCursor: [(u) => say(hovered(u))] },
    }, [[0, 1], [0, 1]]);
    made.over.addEventListener("click", () => { const found = hovered(made); if (found) view.choose(...found); });

    return {
      forget: () => { image = null; },
      move: () => { say(); made.redraw(false); },
      show: () => { // other rows, or another grid
        showScale();
        made.setSize({ width: made.width, height: height() });
        made.setData([[0, 1], [0, 1]]); // sets the scales anew
        image = null;
        fill();
        say();
      },
      worst: () => { // the layer and column that the page opens at
        let [best, value] = [columns().length - 1, -1];
        codes().forEach((found, i) => {
          const rank = found === MISSING ? -1 : view.metric.worst === "lowest" && found < WRONG ? LAST - found : found;
          if (rank > value) [best, value] = [i, rank];
        });
        return [Math.floor(best / columns().length), best % columns().length];
      },
    };
  }

  // ---- the histogram of the chosen layer, operand and step, beside the numbers of its format

  function histogram(figure, view) {
    let found = null, range = [0, 1], bar = 0;
    const read = () => {
      const operand = view.metric.operands ? view.operand : "gradient", part = view.run.histograms.operands[operand];
      if (!part) return null;
      const at = view.step * view.run.layers.length + view.layer, amax = decode(part.amax, Float32Array)[at];
      if (!(amax > 0 && Number.isFinite(amax))) return null;
      const codes = decode(part.shares, Uint16Array).subarray(at * data.binades, (at + 1) * data.binades);
      const scales = part.scale ? [part.scale, part.smallest_scale].map((text) => decode(text, Float32Array)[at]) : [];
      const format = view.run.layers[view.layer].formats[operand], points = data.formats[format];
      const scaled = points && scales.length && scales.every((scale) => scale > 0 && Number.isFinite(scale));
      const reach = scaled && { points, scales: [...new Set(scales)], high: points.at(-1) * scales[0], low: points[0] * scales[1] };
      const shares = [...codes].map((share) => share / 65535);
      return { amax, format, numbers: reach || null, top: Math.floor(Math.log2(amax)), shares };
    };
    const binade = (k) => `${k < data.binades - 1 ? number(2 ** (found.top - k)) : "0"} to ${number(2 ** (found.top - k + 1))}`;
    const say = () => {
      if (found) readout.textContent = `${binade(bar)}: ${number(found.shares[bar], "share")} of the elements`;
    };
    const press = (key) => {
      const steps = { ArrowLeft: 1, ArrowRight: -1, Home: Infinity, End: -Infinity };
      if (!(key in steps)) return false;
      bar = clamp(bar + steps[key], 0, data.binades - 1);
      say();
      return true;
    };
    const rows = () => [["magnitude", "share of the elements"], ...(found?.shares ?? []).map((share, k) => [binade(k), number(share, "share")])];
    const label = "Histogram of the magnitudes of a tensor. Left and right arrow keys move from bar to bar.";
    const { box, readout, fill } = parts(figure, label, press, rows);

    /* Shade what is clipped and what becomes 0, and draw a tick for each number of the format, a row for each scale. */
    function draw(u) {
      if (!found?.numbers) return;
      const { ctx, bbox } = u, { points, scales, high, low } = found.numbers, right = bbox.left + bbox.width;
      const place = (x) => u.valToPos(Math.log2(x), "x", true), inside = (x) => clamp(place(x), bbox.left, right);
      ctx.save();
      ctx.globalAlpha = 0.13;
      ctx.fillStyle = css("--wrong");
      ctx.fillRect(inside(high), bbox.top, right - inside(high), bbox.height);
      ctx.fillRect(bbox.left, bbox.top, inside(low / 2) - bbox.left, bbox.height);
      ctx.globalAlpha = 1;
      ctx.lineWidth = devicePixelRatio;
      scales.forEach((scale, row) => {
        const top = bbox.top + 14 * row * devicePixelRatio;
        ctx.strokeStyle = css(row ? "--series-2" : "--series-1");
        ctx.beginPath();
        for (const left of points.map((point) => place(point * scale)).filter((x) => bbox.left <= x && x <= right)) {
          ctx.moveTo(left, top + 1);
          ctx.lineTo(left, top + 12 * devicePixelRatio);
        }
        ctx.stroke();
      });
      ctx.restore();
    }

    function describe() {
      if (!found) return "no value that is finite and not zero was recorded.";
      if (!found.numbers) return `amax ${number(found.amax)}, not quantized.`;
      const scales = found.numbers.scales.map((scale) => number(scale));
      const which = scales.length > 1 ? "the largest scale, and below it times the smallest" : "the scale";
      return `amax ${number(found.amax)}, in ${found.format}, ${scales.length > 1 ? "scales" : "scale"} ${scales.join(" down to ")}. `
        + `The ticks are the numbers of the format times ${which}. Shaded: larger values are clipped, smaller ones become 0.`;
    }

    const made = plot(box, () => 280, {
      series: [{}, {
        stroke: () => css("--series-0"), fill: () => css("--series-0"),
        paths: uPlot.paths.bars({ size: [0.9, Infinity] }), points: { show: false },
      }],
      scales: { x: { time: false, range: () => range }, y: { distr: 3, range: () => [1e-5, 1] } },
      axes: [
        axis("magnitude", { values: (u, all) => all.map((x) => (Number.isInteger(x) ? `2^${x}` : "")), size: 34 }),
        axis("share of the elements", {
          splits: () => [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1], filter: (u, all) => all,
          values: (u, all) => all.map((y) => number(y, "share")), size: 70,
        }),
      ],
      cursor: { y: false, drag: { x: false, y: false } },
      hooks: {
        draw: [draw],
        setCursor: [(u) => { if (Number.isInteger(u.cursor.idx) && u.cursor.left >= 0) { bar = data.binades - 1 - u.cursor.idx; say(); } }],
      },
    }, [[], []]);

    return {
      show: () => {
        found = read();
        const shares = found?.shares ?? [], first = shares.findIndex((share) => share > 0), numbers = found?.numbers;
        const bottom = found ? found.top - shares.findLastIndex((share) => share > 0) : 0, top = found ? found.top + 1 : 1;
        const [low, high] = numbers ? [Math.floor(Math.log2(numbers.low)) - 1, Math.ceil(Math.log2(numbers.high))] : [bottom, top];
        range = [Math.min(bottom, low) - 1, Math.max(top, high) + 1];
        made.setData([shares.map((_, k) => found.top - k + 0.5).reverse(), shares.map((share) => share || null).reverse()]);
        const operand = view.metric.operands ? view.operand : "gradient", step = view.run.histograms.steps[view.step];
        $("histogram-caption").textContent = `${view.run.layers[view.layer].name}, ${operand} at step ${step}: ${describe()}`;
        bar = Math.max(first, 0);
        readout.textContent = "";
        fill();
      },
    };
  }

  // ---- the controls of a watched run

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
    const open = () => { [view.layer, view.column] = heat.worst(); filter(); };
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

  // ---- the page

  for (const chart of data.charts) drawLines($(chart.id), chart);
  const forget = data.watched ? watch(data.watched) : () => {};
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    forget();
    for (const made of plots) made.redraw();
  });
  requestAnimationFrame(() => setTimeout(() => { document.documentElement.dataset.drawn = Math.round(performance.now()); }));
})();
