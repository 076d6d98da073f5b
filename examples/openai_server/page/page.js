// Streams two completions of one text and shows their bytes as they come. Text is only ever set as
// text, never as markup.
"use strict";

const field = (id) => document.getElementById(id);

// Yields the JSON bodies of a stream of server-sent events.
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (kept + value).split("\n\n");
    kept = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function span(text, kind) {
  const element = document.createElement("span");
  element.textContent = text;
  element.className = kind;
  return element;
}

// One answer. data-chunks counts what came, data-state says how it ended.
async function answer(index, request) {
  const output = field("answer" + index), rate = field("rate" + index);
  const said = span("", "said");
  output.replaceChildren(span(request.prompt, "given"), said);
  output.dataset.state = "running";
  output.dataset.chunks = 0;
  const begin = performance.now();
  try {
    const reply = await fetch("v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...request, stream: true, seed: request.seed + index }),
    });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    for await (const body of events(reply)) {
      if (body.error) throw new Error(body.error.message);
      said.textContent += body.choices[0].text;
      output.dataset.chunks = Number(output.dataset.chunks) + 1;
      const seconds = (performance.now() - begin) / 1000;
      rate.textContent = (output.dataset.chunks / seconds).toFixed(0) + " bytes a second";
    }
    output.dataset.state = "done";
  } catch (error) {
    output.append(span("\n" + error.message, "failed"));
    output.dataset.state = "failed";
  }
}

async function run() {
  field("go").disabled = true;
  const request = {
    model: "trained",
    prompt: field("prompt").value,
    max_tokens: Number(field("tokens").value),
    temperature: Number(field("temperature").value),
    seed: Number(new URLSearchParams(location.search).get("seed") ?? Date.now()),
  };
  await Promise.all([answer(0, request), answer(1, request)]);
  field("go").disabled = false;
}

field("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});

// ?prompt=TEXT&tokens=N&seed=N fills the form and starts.
const given = new URLSearchParams(location.search);
if (given.has("tokens")) field("tokens").value = given.get("tokens");
if (given.has("prompt")) {
  field("prompt").value = given.get("prompt");
  run();
}
