// Reads the event stream /events and draws it. It sends nothing but the key.
"use strict";

const MAX_SAMPLES = 1000, NUM_SNAPSHOTS = 120, RETRY_MS = 2000, KEY = "rollout-key";
const MINUTE = 60; // snapshots, one each second
const NUM_SLOTS = 6, MAX_RUNNING_TOKENS = 200; // as on the server
const ENDED_SLOT_MS = 4000;
const byId = (id) => document.getElementById(id);
const number = (value) => Math.round(value).toLocaleString("en-US");
const samples = []; // {data, box}, newest first
const snapshots = []; // sums over the engines, oldest first
let started = null; // start time of the server that sent the samples
let nextSerial = 0; // serial of the first sample that has not arrived

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function duration(seconds) {
  if (seconds >= 1) return seconds.toFixed(seconds < 10 ? 2 : 1) + " s";
  return (1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0) + " ms";
}

// ---- the server

function showServer(server) {
  byId("model").textContent = document.title = server.model;
  showExample(server);
  if (server.started !== started) { // its serials begin anew
    for (const { box } of samples.splice(0)) box.remove();
    for (const slot of slots) clearSlot(slot);
    snapshots.length = 0;
    [started, nextSerial] = [server.started, 0];
    addSamples([]);
  }
}

function showExample({ example, needs_key: needsKey }) {
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  const quoted = (text) => "'" + text.replaceAll("'", "'\\''") + "'";
  byId("try").hidden = false;
  byId("url").textContent = base;
  byId("key-note").hidden = !needsKey;
  byId("curl").hidden = !example;
  if (!example) return;
  const url = base + "/" + example.path;
  byId("curl").textContent = [
    "curl " + (/^[\w:/.-]+$/.test(url) ? url : quoted(url)),
    "-H 'Content-Type: application/json'",
    ...(needsKey ? ['-H "Authorization: Bearer $ROLLOUT_API_KEY"'] : []),
    "-d " + quoted(example.body),
  ].join(" \\\n  ");
}

// ---- the fleet

function showFleet(fleet) {
  const total = (name) => fleet.engines.reduce((sum, engine) => sum + engine[name], 0);
  byId("state").textContent = fleet.state.toLowerCase();
  byId("state").className = "badge " + fleet.state.toLowerCase();
  byId("version").textContent = fleet.weights_version;
  const count = fleet.engines.length;
  byId("num-engines").textContent = count + (count === 1 ? " engine" : " engines");
  byId("clock").textContent = new Date(fleet.time * 1000).toLocaleTimeString();
  byId("rate").textContent = number(total("generated_tokens_per_s"));
  byId("prefill").textContent = number(total("prefill_tokens_per_s"));
  numRunning = total("num_running") + total("num_paused");
  byId("running").textContent = number(numRunning);
  byId("waiting").textContent = number(total("num_waiting"));
  byId("blocks").textContent = Math.round(100 * total("num_blocks_used") / (total("num_blocks_total") || 1)) + "%";
  byId("num-blocks").textContent = number(total("num_blocks_used")) + " / " + number(total("num_blocks_total"));
  byId("finished").textContent = number(total("num_finished"));
  byId("failed").textContent = number(total("num_failed"));
  snapshots.push({
    rate: total("generated_tokens_per_s"),
    numFirst: total("num_first_tokens"),
    firstSeconds: total("first_token_seconds"),
    numLater: total("num_later_tokens"),
    laterSeconds: total("token_seconds"),
  });
  snapshots.splice(0, snapshots.length - NUM_SNAPSHOTS);
  byId("first-token").textContent = meanOfMinute("numFirst", "firstSeconds");
  byId("between-tokens").textContent = meanOfMinute("numLater", "laterSeconds");
  drawCurve(byId("rate-curve"), snapshots.map(({ rate }) => rate));
  byId("engines").tBodies[0].replaceChildren(...fleet.engines.map(engineRow));
  showRunningNote();
}

// The mean latency of the tokens since the snapshot of a minute ago.
function meanOfMinute(count, seconds) {
  const now = snapshots[snapshots.length - 1];
  const before = snapshots[Math.max(0, snapshots.length - 1 - MINUTE)];
  const num = now[count] - before[count]; // negative after a restart of an engine
  return num > 0 ? duration(Math.max(0, now[seconds] - before[seconds]) / num) : "–";
}

const COLUMNS = [...document.querySelectorAll("#engines th")].map((cell) => cell.textContent);

function engineRow(engine) {
  const row = element("tr");
  const cell = (content, className) => {
    const made = element("td", className);
    made.dataset.label = COLUMNS[row.children.length]; // shown where the table has no head
    made.append(content);
    row.append(made);
  };
  cell(engine.rank);
  cell(engine.state.toLowerCase(), "text");
  cell(engine.weights_version);
  for (const name of ["num_waiting", "num_running", "num_paused"]) cell(number(engine[name]));
  const blocks = element("span"), meter = element("meter");
  meter.max = engine.num_blocks_total;
  meter.value = engine.num_blocks_used;
  blocks.append(meter, number(engine.num_blocks_used) + " / " + number(engine.num_blocks_total));
  cell(blocks, "text");
  for (const name of ["generated_tokens_per_s", "steps_per_s", "num_finished", "num_failed"]) {
    cell(number(engine[name]));
  }
  return row;
}

function drawCurve(svg, values) {
  // A young curve takes the whole width all the same.
  const top = Math.max(1, ...values), step = 240 / Math.max(20, values.length - 1);
  const points = values.map((value, i) => {
    const x = 240 - (values.length - 1 - i) * step, y = 46 - 42 * value / top;
    return x.toFixed(1) + "," + y.toFixed(1);
  });
  const path = (className, d) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", "path");
    if (className) made.setAttribute("class", className);
    made.setAttribute("d", d);
    return made;
  };
  const first = (240 - (values.length - 1) * step).toFixed(1);
  svg.replaceChildren(
    path("area", "M" + first + ",48 L" + points.join(" L") + " L240,48 Z"),
    path("", "M" + points.join(" L")),
  );
}

// ---- samples that generate now

// A slot keeps the sample that ended in it until another one begins, so that the page stands still.
const slots = Array.from({ length: NUM_SLOTS }, () => {
  const box = element("div", "slot"), head = element("p"), text = element("div", "text-of");
  const inner = element("div"); // the end of it is visible
  text.append(inner);
  box.append(head, text);
  box.hidden = true;
  byId("running-samples").append(box);
  return { box, head, inner, data: null, endedAt: null, versions: new Set() };
});
let numRunning = 0;

function clearSlot(slot) {
  slot.data = slot.endedAt = null;
  slot.versions.clear();
  slot.inner.replaceChildren();
  slot.box.hidden = true;
}

function showRunning(running) {
  const now = performance.now();
  const serials = new Set(running.map(({ serial }) => serial));
  for (const slot of slots) {
    if (slot.data && slot.endedAt === null && !serials.has(slot.data.serial)) {
      slot.endedAt = now;
      slot.box.classList.add("ended");
    }
  }
  for (const data of running) {
    let slot = slots.find((each) => each.data && each.data.serial === data.serial);
    if (data.prompt !== undefined) slot = beginSlot(slot || freeSlot(), data);
    if (slot) addTokens(slot, data);
  }
  showRunningNote();
  if (slots.some((slot) => [...slot.versions].some((version) => !colours.has(version)))) drawVersions();
}

// An empty slot, else the one that ended first.
function freeSlot() {
  const empty = slots.find((slot) => !slot.data);
  const ended = slots.filter((slot) => slot.endedAt !== null).sort((a, b) => a.endedAt - b.endedAt);
  return empty || ended[0];
}

function beginSlot(slot, data) {
  if (!slot) return slot;
  clearSlot(slot);
  slot.data = data;
  slot.box.hidden = false;
  slot.box.classList.remove("ended");
  slot.hidden = element("span", "prompt");
  slot.inner.append(element("span", "prompt", data.prompt), slot.hidden);
  return slot;
}

function addTokens(slot, data) {
  for (const [i, token] of data.tokens.entries()) {
    slot.versions.add(data.versions[i]);
    slot.inner.append(tokenSpan(token, data.versions[i]));
  }
  const shown = slot.inner.getElementsByClassName("token");
  while (shown.length > MAX_RUNNING_TOKENS) shown[0].remove();
  const hidden = data.num_tokens - shown.length;
  slot.hidden.textContent = hidden ? " … " + number(hidden) + " tokens … " : "";
  const seconds = Math.max(0, Date.now() / 1000 - slot.data.time);
  slot.head.textContent = slot.data.num_prompt_tokens + " + " + number(data.num_tokens) + " tokens"
    + (data.num_tokens ? "" : " · waits for its first token") + " · " + seconds.toFixed(1) + " s";
}

function showRunningNote() {
  for (const slot of slots) {
    if (slot.endedAt !== null && performance.now() - slot.endedAt > ENDED_SLOT_MS) clearSlot(slot);
  }
  const numShown = slots.filter((slot) => slot.data && slot.endedAt === null).length;
  byId("running-section").hidden = !numRunning && slots.every((slot) => !slot.data);
  if (numRunning) useful();
  byId("running-note").textContent = numRunning > numShown
    ? numShown + " of " + number(numRunning) + " shown"
      + (numShown < NUM_SLOTS ? "; the text of earlier requests comes when they end" : "")
    : "";
}

// The example is folded once: when there is something else to see.
let isUseful = false;
function useful() {
  if (!isUseful) byId("try").open = false;
  isUseful = true;
}

// ---- samples that ended

function addSamples(added) {
  for (const data of added) {
    if (data.serial < nextSerial) continue; // sent again on a new connection
    nextSerial = data.serial + 1;
    const box = element("div", "sample");
    box.dataset.serial = data.serial;
    samples.unshift({ data, box });
    byId("samples").prepend(box);
    inView.observe(box);
  }
  for (const { box } of samples.splice(MAX_SAMPLES)) {
    inView.unobserve(box);
    box.remove();
  }
  if (samples.length) useful();
  byId("num-samples").textContent = samples.length;
  drawHistogram(byId("policy-histogram"), "policy_counts");
  drawHistogram(byId("kv-histogram"), "kv_counts");
  drawVersions();
}

// Tokens are elements only while their sample is near the window: a thousand samples stay quick.
const inView = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const box = entry.target;
    if (!entry.isIntersecting) {
      if (!box.firstChild) continue;
      // Measured already: offsetHeight would lay the page out once more for each box.
      box.style.minHeight = entry.boundingClientRect.height + "px";
      box.replaceChildren();
    } else if (!box.firstChild) {
      const sample = samples.find((each) => each.box === box);
      if (sample) fill(box, sample.data);
      box.style.minHeight = "";
    }
  }
}, { rootMargin: "400px" });

function fill(box, data) {
  const facts = [
    new Date(data.time * 1000).toLocaleTimeString(),
    data.num_prompt_tokens + " + " + number(data.num_tokens) + " tokens",
    "ended by " + data.finish_reason,
    "at version " + data.version,
  ];
  if (data.first_token_s !== null) facts.push("first token after " + duration(data.first_token_s));
  if (data.token_s !== null) facts.push(duration(data.token_s) + " between tokens");
  box.append(element("p", "", facts.join(" · ")));
  const text = element("div", "text-of");
  text.append(element("span", "prompt", data.prompt));
  data.tokens.forEach((token, i) => {
    const span = tokenSpan(token, data.versions[i]);
    span.dataset.index = i;
    text.append(span);
  });
  const hidden = data.num_tokens - data.tokens.length;
  if (hidden) text.append(element("span", "prompt", " … " + number(hidden) + " more"));
  box.append(text);
}

function tokenSpan(token, version) {
  const span = element("span", "token", token);
  span.style.setProperty("--hue", hueOf(version));
  return span;
}

function aboutToken(span) {
  const box = span.closest(".sample"), i = Number(span.dataset.index);
  const { data } = samples.find((each) => each.box === box);
  const logProb = data.log_probs ? data.log_probs[i].toFixed(3) : "not asked for";
  return "token " + i + " · log-prob " + logProb + " · version " + data.versions[i]
    + " · policy staleness " + (data.version - data.versions[i])
    + " · KV staleness " + data.kv_staleness[i];
}

let chosen = null;
function choose(target) {
  if (chosen) chosen.classList.remove("chosen");
  chosen = target && target.closest ? target.closest(".token") : null;
  byId("about-token").hidden = !chosen;
  if (!chosen) return;
  chosen.classList.add("chosen");
  byId("about-token").textContent = aboutToken(chosen);
}

function drawHistogram(box, name) {
  const counts = new Map();
  for (const { data } of samples) {
    for (const [age, count] of Object.entries(data[name])) {
      counts.set(Number(age), (counts.get(Number(age)) || 0) + count);
    }
  }
  const total = [...counts.values()].reduce((a, b) => a + b, 0), most = Math.max(...counts.values());
  const rows = [...counts].sort((a, b) => a[0] - b[0]).flatMap(([age, count]) => {
    const bar = element("i");
    bar.style.width = (100 * count / most) + "%";
    const share = number(count) + " (" + (100 * count / total).toFixed(1) + "%)";
    return [element("span", "", age), bar, element("span", "", share)];
  });
  box.replaceChildren(...rows);
}

// ---- versions

// Neighbouring versions get hues far apart.
const hueOf = (version) => String((version * 137.508 + 210) % 360);
let colours = new Set(); // the versions on the page

function drawVersions() {
  colours = new Set(slots.flatMap((slot) => [...slot.versions]));
  for (const { data } of samples) {
    for (const age of Object.keys(data.policy_counts)) colours.add(data.version - Number(age));
  }
  const several = colours.size > 1;
  byId("main").classList.toggle("coloured", several);
  byId("staleness").hidden = !several || !samples.length;
  byId("versions").hidden = !colours.size;
  byId("colour-note").textContent = several ? "Each token has the colour of the version that sampled it:"
    : "All tokens were sampled by version " + [...colours][0] + "; with a second version they get colours.";
  const labels = [...colours].sort((a, b) => b - a).slice(0, 24).map((version) => {
    const label = element("span", "version", "version " + version);
    label.style.setProperty("--hue", hueOf(version));
    return label;
  });
  byId("legend").replaceChildren(...(several ? labels : []));
}

// ---- the connection

const handlers = {
  server: showServer,
  fleet: showFleet,
  running: showRunning,
  samples: addSamples,
};

// EventSource sends no Authorization header, so the stream is read by hand.
async function watch() {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: "Bearer " + key } : {};
  const response = await fetch("events", { headers, cache: "no-store" });
  byId("main").hidden = response.status === 401;
  byId("key-form").hidden = !byId("main").hidden;
  if (response.status === 401) {
    sessionStorage.removeItem(KEY);
    return false;
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return true;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const [kind, data] = event.split("\n");
      handlers[kind.slice("event: ".length)](JSON.parse(data.slice("data: ".length)));
    }
  }
}

async function watchForever() {
  for (;;) {
    let goesOn = true;
    try {
      goesOn = await watch();
    } catch (error) {
      console.warn(error);
    }
    byId("state").textContent = goesOn ? "no connection" : "locked";
    byId("state").className = "badge lost";
    showRunning([]);
    if (!goesOn) return;
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  byId("key").value = "";
  watchForever();
});
byId("samples").addEventListener("pointerover", (event) => choose(event.target));
byId("samples").addEventListener("pointerleave", () => choose(null));
byId("samples").addEventListener("click", (event) => choose(event.target));
addSamples([]);
watchForever();
