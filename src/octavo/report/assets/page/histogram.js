// The histogram of the chosen layer, operand and step, beside the numbers of its format.

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
      axis("magnitude", { values: (u, all) => all.map((x) => (Number.isInteger(x) ? `2${superscript(x)}` : "")), size: 34 }),
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
