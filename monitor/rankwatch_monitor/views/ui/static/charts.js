// Charts drawn by echarts: headroom by row and batch, and readings over batches. All work with a keyboard and a screen reader.
"use strict";

const Charts = (() => {
  const FAR = 24; // doublings; all that is farther away has the same shade
  const LEFT = 62, RIGHT = 24; // beside the charts of a page, so that a batch is at one place in all of them

  // 1, 2 or 5 times a power of ten, and no less than this.
  const nice = (least) => { const ten = 10 ** Math.floor(Math.log10(Math.max(least, 1))); return [1, 2, 5, 10].find((times) => times * ten >= least) * ten; };

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function number(value, state) {
    if (value === null || value === undefined) return state || "-";
    if (value === 0) return "0.00e+00";
    return value.toExponential(2).replace(/e([+-])(\d)$/, "e$10$2");
  }

  const MOST = 10; // doublings above what is usual; all that is more has the same shade
  const NEAR = 3, STRANGE = 5; // doublings to the end of a dtype, and above what is usual, from which on `rankwatch top` is yellow

  const isUsual = (grid) => grid.cells.every((row) => row.every((cell) => cell === null || (cell >= 0 && (grid.measure === "change" ? cell <= STRANGE : cell >= NEAR))));

  // Headroom comes as a number of doublings, and is shown as the factor by which a reading could grow.
  function times(headroom, measure) {
    if (headroom === null) return "nothing read";
    if (headroom < 0) return "inf or nan";
    if (measure === "change") return headroom > 0 ? `+${headroom.toFixed(1)} doublings above its recent median` : "no more than usual";
    return headroom < 20 ? `x${Number((2 ** headroom).toPrecision(3))} below overflow` : `2^${Math.round(headroom)} below overflow`;
  }

  // The title of a heatmap by ``what``, and what its cells say.
  const heading = (grid, what) => `${grid.measure === "change" ? "Change" : "Headroom"} by ${what} and batch`;
  const legend = (grid, what) => (grid.measure === "change"
    ? `Darker: larger than usual for this ${what}, which is the median of its batches before. One doubling is a factor of 2. bfloat16 and float32 end at 1e38: there this says more than how near the end is.`
    : `Darker: nearer to the largest number of its dtype. Look for rows that grow darker.`);
  const USE = "Point at a cell, or move with the arrow keys, to read it.";

  // The end of a long name says more than its beginning.
  const tail = (name, most) => (name.length > most ? `…${name.slice(-Math.floor(most))}` : name);

  function rowOf(grid, rank) {
    return grid.rows.findIndex((name) => { const [first, last] = name.split("-").map(Number); return rank >= first && rank <= (last === undefined ? first : last); });
  }

  function batches(grid, column) {
    const first = grid.first + column * grid.step;
    return grid.step === 1 ? `batch ${first}` : `batches ${first} to ${first + grid.step - 1}`;
  }

  // A canvas; ``options`` draws it again when the data, the size or the colour scheme changes. It is made when it is first seen,
  // and given to ``begin``: a folded chart has no size.
  function chart(box, options, begin) {
    let made = null;
    const draw = () => {
      if (!box.clientWidth) return;
      if (!made) {
        made = echarts.init(box, null, { renderer: "canvas" });
        if (begin) begin(made);
      }
      made.resize();
      made.setOption({ animation: false, backgroundColor: "transparent", ...options() }, { notMerge: true });
    };
    new ResizeObserver(draw).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    return { draw, act: (action) => made && made.dispatchAction(action) };
  }

  // How to read a chart, behind a ? beside the title of its section. Returns what sets the text.
  function explain(section, text) {
    const how = Views.h("p", { class: "faint how", hidden: true }, text);
    const ask = Views.h("button", { type: "button", class: "ask", "aria-label": "How to read it", "aria-expanded": "false" }, "?");
    ask.addEventListener("click", () => { how.hidden = !how.hidden; ask.setAttribute("aria-expanded", String(!how.hidden)); });
    const [title, head] = [section.querySelector("h2") || "", Views.h("div", { class: "titled" })];
    section.prepend(head, how);
    head.append(title, ask);
    return (fresh) => { how.textContent = fresh; };
  }

  const text = () => ({ color: colour("--faint"), fontFamily: "system-ui, sans-serif" });
  const tooltip = (more) => ({
    renderMode: "richText", confine: true, backgroundColor: colour("--panel"), borderColor: colour("--line"),
    textStyle: { ...text(), color: colour("--ink"), fontSize: 12 }, ...more,
  });
  const axis = (name, more) => ({
    name, nameTextStyle: text(), axisLabel: { ...text(), ...(more && more.axisLabel) }, axisLine: { onZero: false, lineStyle: { color: colour("--line") } },
    axisTick: { show: false }, splitLine: { show: false }, ...more, ...(more && more.axisLabel ? { axisLabel: { ...text(), ...more.axisLabel } } : {}),
  });

  const key = (more) => ({
    type: "scroll", top: 6, icon: "path://M0,0h18v3h-18z", itemWidth: 18, itemHeight: 15, textStyle: { ...text(), lineHeight: 18 }, pageTextStyle: text(), inactiveColor: colour("--line"), ...more,
  });

  // ``what`` is the kind of a row ("rank", "module"); a click or Enter on a cell calls ``select(row, column)``.
  function heatmap(parent, what, select) {
    const box = Views.h("div", { class: "chart", tabindex: "0", role: "img" });
    const note = Views.h("p", { class: "note", "aria-live": "polite" });
    const tell = explain(parent);
    parent.append(box, note);
    let grid = { first: 0, step: 1, rows: [], cells: [] };
    let cells = [];
    let marked = new Map(); // by row, what it is marked for
    let at = null;
    const say = (row, column) => `${what} ${grid.rows[row]}, ${batches(grid, column)}: ${times(grid.cells[row][column], grid.measure)}`;

    const { draw, act } = chart(box, () => {
      const narrow = box.clientWidth < 600;
      const isChange = grid.measure === "change";
      const colours = [colour("--near"), colour("--middle"), colour("--far")];
      const names = Math.max(LEFT, Math.min(Math.max(...grid.rows.map((row) => row.length), 3) * 6.6 + 16, narrow ? 90 : 330));
      const every = Math.ceil(grid.rows.length / (box.clientHeight / 16));
      const columns = Math.max(0, ...grid.cells.map((row) => row.length));
      const apart = nice((columns * grid.step) / (narrow ? 5 : 12)); // between two labels, as on the axis of a curve
      const round = (batch) => Math.ceil(batch / apart) * apart;
      const isRound = (index) => round(grid.first + index * grid.step) < grid.first + (index + 1) * grid.step;
      const good = cells.filter((cell) => cell[2] >= 0);
      const bad = cells.filter((cell) => cell[2] < 0);
      return {
        textStyle: text(),
        grid: { left: names, right: RIGHT, top: bad.length ? 62 : 38, bottom: 42 },
        tooltip: tooltip({ formatter: ({ value }) => say(value[1], value[0]) }),
        xAxis: axis("batch", {
          type: "category", nameLocation: "middle", nameGap: 26,
          data: Array.from({ length: columns }, (_, column) => grid.first + column * grid.step),
          axisLabel: { interval: (index) => isRound(index), formatter: (batch) => String(round(Number(batch))) },
        }),
        yAxis: axis("", {
          type: "category", inverse: true, data: narrow && grid.keys && grid.keys.length ? grid.keys.map((key) => Views.module(key[0])) : grid.rows,
          axisLabel: {
            formatter: (name, index) => (marked.has(index) ? `{marked|▸ ${tail(name, names / 6.6 - 3)}}` : tail(name, names / 6.6 - 2)),
            rich: { marked: { color: colour("--bad"), fontWeight: 700 } },
            interval: (index) => marked.has(index) || (index % every === 0 && ![...marked.keys()].some((other) => Math.abs(other - index) < every)),
          },
        }),
        visualMap: [
          {
            type: "continuous", seriesIndex: 0, min: 0, max: isChange ? MOST : FAR, dimension: 2, orient: "horizontal", left: "center", top: 6, calculable: false,
            itemWidth: 12, itemHeight: narrow ? 110 : 220, text: isChange ? [`+${MOST} doublings`, "as usual"] : ["far from overflow", "next to it"], textStyle: text(),
            inRange: { color: isChange ? colours.reverse() : colours }, hoverLink: false,
          },
          {
            type: "piecewise", seriesIndex: 1, dimension: 2, show: bad.length > 0, left: "center", top: 32, itemSymbol: "rect", textStyle: text(),
            pieces: [{ lte: -1, color: colour("--bad"), label: "inf or nan" }], hoverLink: false, selectedMode: false,
          },
        ],
        series: [good, bad].map((data) => ({
          type: "heatmap", data, progressive: 0, emphasis: { itemStyle: { borderColor: colour("--ink"), borderWidth: 2 } },
        })),
      };
    }, (made) => made.on("click", ({ value }) => select && select(value[1], value[0], grid)));

    function point(row, column) {
      at = [Math.min(Math.max(row, 0), grid.rows.length - 1), Math.min(Math.max(column, 0), grid.cells[0].length - 1)];
      const index = (bad) => cells.filter((cell) => cell[2] < 0 === bad).findIndex((cell) => cell[1] === at[0] && cell[0] === at[1]);
      const value = grid.cells[at[0]][at[1]];
      if (value !== null && value !== undefined) {
        const where = { seriesIndex: value < 0 ? 1 : 0, dataIndex: index(value < 0) };
        act({ type: "downplay" });
        act({ type: "highlight", ...where });
        act({ type: "showTip", ...where });
      }
      note.textContent = say(...at);
    }
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-10, 0], PageDown: [10, 0] };
    box.addEventListener("keydown", (event) => {
      if (!grid.rows.length || !grid.cells[0].length) return;
      if (event.key === "Enter" && at && select) select(...at, grid);
      const move = moves[event.key];
      if (!move) return;
      event.preventDefault();
      point(...(at ? [at[0] + move[0], at[1] + move[1]] : [0, grid.cells[0].length - 1]));
    });

    // ``marks``: what ranks are marked for, of [rank, text].
    return (fresh, marks) => {
      grid = fresh;
      marked = new Map((marks || []).map(([rank, text]) => [rowOf(grid, rank), `${what} ${rank} (${text})`]).filter(([row]) => row >= 0));
      tell([legend(grid, what), USE, select ? "A click, or Enter, opens it." : "", marked.size ? `▸ marks ${[...marked.values()].join(", ")}.` : ""].filter(Boolean).join(" "));
      cells = grid.cells.flatMap((row, y) => row.flatMap((value, x) => (value === null ? [] : [[x, y, value]])));
      const badness = (value) => (grid.measure === "change" && value >= 0 ? -value : value < 0 ? -Infinity : value);
      const worst = cells.reduce((least, cell) => (least === null || badness(cell[2]) < badness(least[2]) ? cell : least), null);
      box.setAttribute("aria-label", `${heading(grid, what)}. ${worst ? `Worst: ${say(worst[1], worst[0])}.` : "No data yet."} Arrow keys move from cell to cell${select ? ", Enter opens one" : ""}.`);
      box.style.height = `${Math.min(Math.max(104 + 18 * grid.rows.length, 160), 720)}px`;
      draw();
    };
  }

  // A heat map that is folded while all is as usual, until it is clicked. ``controls`` stand above it.
  function folded(parent, what, isOpen, select, ...controls) {
    const [title, said, inner] = [Views.h("h2"), Views.h("span", { class: "faint" }), Views.h("section")];
    const summary = Views.h("summary", { class: "titled" }, title, said);
    const details = Views.h("details", { class: "heat", open: isOpen }, summary, inner);
    parent.append(details);
    const draw = heatmap(inner, what, select);
    inner.querySelector(".titled").append(...controls);
    let isClicked = isOpen;
    summary.addEventListener("click", () => { isClicked = true; });
    return (grid, marks) => {
      title.textContent = heading(grid, what);
      said.textContent = isUsual(grid) ? `as usual on every ${what}` : "";
      if (!isClicked) details.open = !isUsual(grid);
      draw(grid, marks);
    };
  }

  const CURVES = { loss: "Loss", norm: "Norm of the gradients", rate: "Batches a second", gradient: "Largest gradient", memory: "Device memory, GiB" };
  const HOW = {
    loss: "What the training hands to backward(): thick is the mean of the ranks, thin is each rank. Losses that take turns, such as a GAN's two, have a colour each, named after the class that they train. A loss should fall and level out; a jump or a diamond (inf or nan) is where to look. A rank far above the others has other data, or another model. Below each batch stands the time since the first one.",
    rate: "It should be level. A dip is a pause, such as an evaluation or a checkpoint; a lasting drop is a slow rank, host or disk.",
    norm: "The norm of all gradients in the optimizer step before each batch, as they came: before clip_grad_norm_. A slow rise, or ever higher peaks, comes before a divergence; a single peak is a bad batch; near zero, nothing learns. Under DDP all ranks have the same one. Where ranks hold shards and no clip_grad_norm_ runs, it is that of each rank's shards.",
    memory: "What tensors take on each rank's GPU, as the forward ends: near the peak of a step. It should be level; a steady rise is a leak, such as losses that are kept with their graphs; a rank far above the others has longer inputs, or more of the model.",
    gradient: "The largest single gradient of a batch, over all ranks; of a long run, of some batches. A slow rise over many batches comes before an overflow; a jump is a bad batch; zero means that nothing learns.",
  };
  const HOW_LINES = "Each line is the reading's largest number (abs max) by batch, on a logarithmic scale; dashed: its smallest (abs min); a diamond: inf or nan. A healthy reading stays in its range; look for the batch in which it leaves it. Ctrl and the wheel zoom; the arrow keys read point by point.";

  const figure = (value) => (Math.abs(value) >= 0.001 && Math.abs(value) < 1e5 ? String(Number(value.toPrecision(4))) : value === 0 ? "0" : number(value));

  const size = (value) => figure(value).replace(".00e", "e"); // at an axis
  // A logarithmic axis of whole decades, of which six at most have labels.
  function decades(numbers) {
    const [low, high] = [Math.floor(Math.log10(Math.min(...numbers))), Math.ceil(Math.log10(Math.max(...numbers)))];
    const interval = Math.max(1, Math.ceil((high - low) / 6));
    const least = Math.floor(low / interval) * interval;
    return { type: "log", min: 10 ** least, max: 10 ** Math.max(Math.ceil(high / interval) * interval, least + interval), interval, axisLabel: { formatter: size } };
  }

  // ``clock`` of [batch, seconds since the first one]: the seconds at any batch between them.
  function secondsAt(clock, batch) {
    const after = clock.findIndex(([at]) => at >= batch);
    if (after < 0 || batch < clock[0][0]) return null;
    const [[from, began], [at, then]] = [clock[Math.max(0, after - 1)], clock[after]];
    return at === from ? then : began + ((then - began) * (batch - from)) / (at - from);
  }

  // How the lines of a chart look: a rank is thin where there is a mean, which is thick and lies above it; each of several losses
  // has a colour. "Critic, rank 0" is rank 0 of that loss.
  function styled(drawn) {
    const of = (line) => (/^(.*), (?:mean of the ranks|lowest|highest|rank \d+)$/.exec(line.name) || [])[1];
    const losses = [...new Set(drawn.map(of))];
    const hasMean = drawn.some((line) => line.rank === null);
    const colours = colour("--series").split(" ");
    return drawn.map((line, index) => {
      const isThin = line.thin || (hasMean && line.rank !== null);
      return {
        color: colours[(losses.length > 1 ? losses.indexOf(of(line)) : index) % colours.length], z: isThin ? 2 : 3,
        lineStyle: { width: isThin ? 1 : 2.5, opacity: isThin ? 0.7 : 1, type: line.thin ? "dashed" : "solid" },
      };
    });
  }

  // A number of the whole run over the batches, below the title of ``section``: a line for each of [batch, number or null, rank or
  // null]; null: inf or nan. ``isFromZero``: a small change is to look small. ``isWide``: the time stands below the batches.
  function curves(section, what, how, { isFromZero = false, isWide = false } = {}) {
    const box = Views.h("div", { class: `chart ${isWide ? "wide" : "small"}`, tabindex: "0", role: "img" });
    const note = Views.h("p", { class: "note", "aria-live": "polite" });
    explain(section, how);
    section.append(box, note);
    let drawn = [];
    let marked = []; // [batch, what was left out there]
    let clock = [];
    let shownBy = null; // the heat map whose batches are at the same places
    let at = null;
    // From the left of the first cell to the right of the last one; the labels of such ends are no batches.
    function range() {
      if (!shownBy || !shownBy.cells[0].length) return { min: "dataMin", max: "dataMax" };
      const last = Math.max(...drawn.map((line) => line.points.at(-1)[0]), shownBy.first + shownBy.cells[0].length * shownBy.step - 1);
      return { min: shownBy.first - 0.5, max: last + 0.5 };
    }
    const said = (line, point) => `${line.name}: ${point[1] === null ? "inf or nan" : figure(point[1])}${point[2] === null || point[2] === line.rank ? "" : ` (rank ${point[2]})`}`;
    const passed = (batch) => { const seconds = secondsAt(clock, batch); return seconds === null ? "" : Views.length(seconds); };
    const named = (batch) => `batch ${batch}${passed(batch) && `, after ${passed(batch)}`}`;

    const { draw, act } = chart(box, () => {
      const numbers = drawn.flatMap((line) => line.points.map((point) => point[1]).filter((value) => value !== null));
      const [least, most] = [Math.min(...numbers), Math.max(...numbers)];
      const isLog = numbers.length > 0 && least > 0 && most > 30 * least;
      const styles = styled(drawn);
      const series = drawn.flatMap((line, index) => {
        const bad = line.points.filter((point) => point[1] === null);
        return [
          { ...styles[index], name: line.name, type: "line", showSymbol: line.points.length < 30, symbolSize: 4, data: line.points.map((point) => ({ value: [point[0], point[1]], point, line })) },
          ...(bad.length ? [{ type: "scatter", name: `${line.name}, inf or nan`, color: colour("--bad"), symbol: "diamond", symbolSize: 12, data: bad.map((point) => ({ value: [point[0], numbers.length ? most : 1], point, line })) }] : []),
        ];
      });
      if (series.length && marked.length) {
        series[0].markLine = {
          symbol: "none", animation: false, lineStyle: { color: colour("--bad"), type: "dotted" }, data: marked.map(([batch]) => ({ xAxis: batch })),
          label: { formatter: "left out", position: "insideEndTop", color: colour("--bad") },
        };
      }
      const hasTimes = isWide && clock.length > 1;
      return {
        textStyle: text(),
        grid: { left: LEFT, right: RIGHT, top: drawn.length > 1 ? 40 : 16, bottom: hasTimes ? 58 : 42 },
        legend: key({ show: drawn.length > 1 }),
        tooltip: tooltip({ trigger: "axis", formatter: (points) => [named(points[0].value[0]), ...new Set(points.map(({ data }) => said(data.line, data.point)))].join("\n") }),
        xAxis: axis(hasTimes ? "batch, and the time since the first one" : "batch", {
          type: "value", ...range(), nameLocation: "middle", nameGap: hasTimes ? 40 : 26, minInterval: 1,
          axisLabel: { hideOverlap: true, lineHeight: 15, alignMaxLabel: "right", formatter: (batch) => (Number.isInteger(batch) ? `${batch}${hasTimes ? `\n${passed(batch)}` : ""}` : "") },
        }),
        yAxis: axis("", { ...(isLog ? decades(numbers) : { type: "value", scale: !isFromZero, axisLabel: { formatter: size } }), splitLine: { show: true, lineStyle: { color: colour("--line") } } }),
        dataZoom: [{ type: "inside", zoomOnMouseWheel: "ctrl" }],
        series,
      };
    });
    box.addEventListener("keydown", (event) => {
      const line = drawn[0];
      if (!line || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      event.preventDefault();
      at = Math.min(Math.max((at === null ? line.points.length : at) + (event.key === "ArrowLeft" ? -1 : 1), 0), line.points.length - 1);
      const [batch] = line.points[at];
      note.textContent = `${named(batch)}: ${drawn.flatMap((each) => each.points.filter((point) => point[0] === batch).map((point) => said(each, point))).join(", ")}`;
      act({ type: "showTip", seriesIndex: 0, dataIndex: at });
    });

    return (fresh, { steps = [], times = [], grid = null } = {}) => {
      [drawn, marked, clock, shownBy] = [fresh, steps, times, grid];
      const last = drawn.map((line) => said(line, line.points.at(-1)));
      box.setAttribute("aria-label", drawn.length ? `${what}. At the end: ${last.join(", ")}.${marked.length ? ` Left out: ${marked.map(([, what]) => what).join(", ")}.` : ""} Arrow keys read the points one by one.` : `${what}: no data yet.`);
      draw();
    };
  }

  // The curves of a run: its loss in the first place, the others in the second one. Returns what draws them.
  function ofRun(first, others) {
    const shown = Object.entries(CURVES).map(([name, title]) => {
      const [section, isLoss] = [Views.h("section", null, Views.h("h2", null, title)), name === "loss"];
      (isLoss ? first : others).append(section);
      return { name, isLoss, section, draw: curves(section, title, HOW[name], { isFromZero: !isLoss, isWide: isLoss }) };
    });
    return (body, grid) => shown.forEach(({ name, isLoss, section, draw }) => {
      const lines = body[name].map((line) => ({ ...line, thin: /\b(lowest|highest|slowest)$/.test(line.name) }));
      section.hidden = !lines.some((line) => line.points.length > 1);
      draw(lines, { steps: isLoss ? body.skipped : [], times: body.clock, grid });
    });
  }

  // One reading over the batches: abs max as a line, abs min as a dashed line, inf and nan as diamonds at the top.
  function lines(parent) {
    const box = Views.h("div", { class: "chart", tabindex: "0", role: "img" });
    const note = Views.h("p", { class: "note", "aria-live": "polite" });
    explain(parent, HOW_LINES);
    parent.append(box, note);
    let data = { limit: null, dtype: "", lines: [] };
    let at = null;
    const name = (line) => line.name || (line.rank === null ? "all ranks" : `rank ${line.rank}`);
    const positive = (value) => (value > 0 ? value : null); // the axis is logarithmic

    const { draw, act } = chart(box, () => {
      const colours = colour("--series").split(" ");
      const numbers = data.lines.flatMap((line) => line.points.flatMap((point) => [point[1], point[2]])).filter((value) => value > 0);
      const highest = Math.max(...numbers, 1e-30);
      const series = data.lines.flatMap((line, index) => {
        const shared = { color: colours[index % colours.length], symbolSize: 5, showSymbol: line.points.length < 60 };
        const bad = line.points.filter((point) => point[3] === "inf" || point[3] === "nan");
        return [
          { ...shared, type: "line", name: `${name(line)}, abs max`, data: line.points.map((point) => [point[0], positive(point[2])]) },
          { ...shared, type: "line", name: `${name(line)}, abs min`, lineStyle: { type: "dashed", width: 1 }, data: line.points.map((point) => [point[0], positive(point[1])]) },
          ...(bad.length ? [{
            type: "scatter", name: `${name(line)}, inf or nan`, color: colour("--bad"), symbol: "diamond", symbolSize: 13,
            data: bad.map((point) => ({ value: [point[0], data.limit || highest], state: point[3] })),
          }] : []),
        ];
      });
      if (series.length && data.limit && data.limit < highest * 1e6) {
        series[0].markLine = {
          silent: true, symbol: "none", data: [{ yAxis: data.limit }], lineStyle: { color: colour("--bad") },
          label: { formatter: `${data.dtype}'s largest number`, position: "insideStartTop", color: colour("--bad") },
        };
      }
      return {
        textStyle: text(),
        grid: { left: LEFT, right: RIGHT, top: 40, bottom: 42 },
        legend: key(),
        tooltip: tooltip({
          trigger: "axis",
          formatter: (points) => [`batch ${points[0].value[0]}`, ...points.map((point) => `${point.seriesName}: ${point.data.state || number(point.value[1])}`)].join("\n"),
        }),
        xAxis: axis("batch", { type: "value", scale: true, nameLocation: "middle", nameGap: 26, minInterval: 1 }),
        yAxis: axis("", { ...(numbers.length ? decades(numbers) : { type: "log" }), splitLine: { show: true, lineStyle: { color: colour("--line") } } }),
        dataZoom: [{ type: "inside", zoomOnMouseWheel: "ctrl" }],
        series,
      };
    });
    box.addEventListener("keydown", (event) => {
      const line = data.lines[0];
      if (!line || !line.points.length || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      event.preventDefault();
      at = Math.min(Math.max((at === null ? line.points.length : at) + (event.key === "ArrowLeft" ? -1 : 1), 0), line.points.length - 1);
      const [batch, low, high, state] = line.points[at];
      note.textContent = `${name(line)}, batch ${batch}: abs min ${number(low, state)}, abs max ${number(high, state)}`;
      act({ type: "showTip", seriesIndex: 0, dataIndex: at });
    });

    return (fresh) => {
      data = fresh;
      const count = data.lines.reduce((sum, line) => sum + line.points.length, 0);
      box.setAttribute("aria-label", `${data.lines.map(name).join(", ")}: ${count} points. Arrow keys read them one by one.`);
      draw();
    };
  }

  return { heatmap, folded, lines, curves, ofRun, HOW, number, heading };
})();
