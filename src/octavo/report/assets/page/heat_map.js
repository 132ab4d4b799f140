// The heat map of a watched run. `view` is the state that `watch` holds: what is chosen, and what is shown.

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
      axis("", { ...middles, values: names, size: narrow ? 90 : 190, labelSize: 0, space: 12 }),
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
