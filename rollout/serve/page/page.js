// Reads the event stream /events and draws it. It sends nothing but the key.
"use strict";

const MAX_SAMPLES = 1000, NUM_RATES = 120, RETRY_MS = 2000, KEY = "rollout-key";
const byId = (id) => document.getElementById(id);
const number = (value) => Math.round(value).toLocaleString("en-US");
const samples = []; // {data, element}, newest first
const rates = [];
let started = null; // start time of the server that sent the samples
let nextSerial = 0; // serial of the first sample that has not arrived

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
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
  byId("running").textContent = number(total("num_running") + total("num_paused"));
  byId("waiting").textContent = number(total("num_waiting"));
  byId("blocks").textContent = Math.round(100 * total("num_blocks_used") / (total("num_blocks_total") || 1)) + "%";
  byId("finished").textContent = number(total("num_finished"));
  rates.push(total("generated_tokens_per_s"));
  rates.splice(0, rates.length - NUM_RATES);
  drawCurve(byId("rate-curve"), rates);
  byId("engines").tBodies[0].replaceChildren(...fleet.engines.map(engineRow));
}

function engineRow(engine) {
  const row = element("tr");
  const cell = (text, className) => row.append(element("td", className, text));
  cell(engine.rank);
  cell(engine.state.toLowerCase(), "text");
  cell(engine.weights_version);
  for (const name of ["num_waiting", "num_running", "num_paused"]) cell(number(engine[name]));
  const blocks = element("td", "text"), meter = element("meter");
  meter.max = engine.num_blocks_total;
  meter.value = engine.num_blocks_used;
  blocks.append(meter, number(engine.num_blocks_used) + " / " + number(engine.num_blocks_total));
  row.append(blocks);
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

// ---- samples

// Neighbouring versions get hues far apart.
const hueOf = (version) => String((version * 137.508 + 210) % 360);

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
  byId("num-samples").textContent = samples.length;
  drawHistogram(byId("policy-histogram"), "policy_counts");
  drawHistogram(byId("kv-histogram"), "kv_counts");
  drawLegend();
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
  const when = new Date(data.time * 1000).toLocaleTimeString();
  const counts = data.num_prompt_tokens + " + " + data.num_tokens + " tokens";
  box.append(element("p", "", [when, counts, "ended by " + data.finish_reason, "at version " + data.version].join(" · ")));
  const text = element("div", "text-of");
  text.append(element("span", "prompt", data.prompt));
  data.tokens.forEach((token, i) => {
    const span = element("span", "token", token);
    span.style.setProperty("--hue", hueOf(data.versions[i]));
    span.dataset.index = i;
    text.append(span);
  });
  const hidden = data.num_tokens - data.tokens.length;
  if (hidden) text.append(element("span", "prompt", " … " + number(hidden) + " more"));
  box.append(text);
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
  box.replaceChildren(...(rows.length ? rows : [element("span", "empty", "no samples yet")]));
}

function drawLegend() {
  const versions = new Set(samples.slice(0, 100).flatMap(({ data }) => data.versions));
  const labels = [...versions].sort((a, b) => b - a).slice(0, 24).map((version) => {
    const label = element("span", "version", "version " + version);
    label.style.setProperty("--hue", hueOf(version));
    return label;
  });
  byId("legend").replaceChildren(...labels);
}

// ---- the connection

const handlers = {
  server: showServer,
  fleet: showFleet,
  samples: addSamples,
};

function showServer(server) {
  byId("model").textContent = document.title = server.model;
  if (server.started !== started) { // its serials begin anew
    for (const { box } of samples.splice(0)) box.remove();
    [started, nextSerial] = [server.started, 0];
  }
}

// EventSource sends no Authorization header, so the stream is read by hand.
async function watch() {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: "Bearer " + key } : {};
  const response = await fetch("events", { headers, cache: "no-store" });
  byId("key-form").hidden = response.status !== 401;
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
