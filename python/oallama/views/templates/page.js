"use strict";
(() => {
  const get = (id) => document.getElementById(id);
  const log = get("log"), text = get("text"), model = get("model"), state = get("state");
  let messages = [], running = null;

  const headers = () => {
    const key = sessionStorage.getItem("oallama-key");
    return key ? { "Content-Type": "application/json", Authorization: `Bearer ${key}` } : { "Content-Type": "application/json" };
  };
  const say = (words, failed = false) => {
    state.textContent = words;
    state.classList.toggle("failed", failed);
  };
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  const rate = (perSecond) => `${perSecond < 10 ? perSecond.toFixed(2) : perSecond.toFixed(1)} tokens/s`;

  // The error of an answer that is none, in words.
  const reason = async (answer) => {
    if (answer.status === 401) get("key-form").hidden = false;
    try {
      return (await answer.json()).error.message;
    } catch {
      return `the server answered ${answer.status}`;
    }
  };

  const add = (role, words) => {
    get("hint")?.remove();
    const box = document.createElement("div"), who = document.createElement("span"), body = document.createElement("span");
    box.className = `message ${role}`;
    who.className = "who";
    who.textContent = role === "user" ? "you" : model.selectedOptions[0]?.textContent || "model";
    body.textContent = words;
    box.append(who, body);
    log.append(box);
    log.scrollTop = log.scrollHeight;
    return { box, body };
  };

  // The events of a streamed answer, each as an object.
  async function* events(answer) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
      }
    }
  }

  // Once per frame: a small model has many tokens meanwhile.
  let drawn = 0;
  const draw = (body, words) => {
    cancelAnimationFrame(drawn);
    drawn = requestAnimationFrame(() => {
      const low = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      body.textContent = words;
      if (low) log.scrollTop = log.scrollHeight;
    });
  };

  const think = (shown, words) => {
    if (!shown.thoughts) {
      const details = document.createElement("details"), summary = document.createElement("summary");
      summary.textContent = "thoughts";
      shown.thoughts = document.createElement("span");
      details.append(summary, shown.thoughts);
      shown.box.insertBefore(details, shown.body);
    }
    shown.thoughts.textContent += words;
  };

  const ask = async () => {
    const words = text.value.trim();
    if (!words || running) return;
    text.value = "";
    add("user", words);
    messages.push({ role: "user", content: words });
    const conversation = messages, shown = add("assistant", "");
    running = new AbortController();
    get("send").disabled = true;
    get("stop").hidden = false;
    let said = "", end = "";
    try {
      const answer = await fetch("v1/chat/completions", {
        method: "POST", headers: headers(), signal: running.signal,
        body: JSON.stringify({ model: model.value, messages, stream: true, stream_options: { include_usage: true } }),
      });
      if (!answer.ok) throw new Error(await reason(answer));
      for await (const event of events(answer)) {
        if (event.error) throw new Error(event.error.message);
        const delta = event.choices?.[0]?.delta ?? {};
        if (delta.reasoning_content) think(shown, delta.reasoning_content);
        if (delta.content) {
          said += delta.content;
          draw(shown.body, said);
        }
        const times = event.timings;
        if (times) {
          get("last").textContent = `${times.predicted_n} tokens, ${rate(times.predicted_per_second)}, first one after ${(times.prompt_ms / 1000).toFixed(2)} s`;
        }
        end ||= event.choices?.[0]?.finish_reason ?? "";
      }
      if (!end) throw new Error("the server ended before the answer did");
      if (end === "length") add("assistant failed", "cut: the context is full, or the server's limit of tokens reached");
    } catch (error) {
      if (error.name !== "AbortError") {
        shown.box.classList.add("failed");
        draw(shown.body, `${said}${said ? "\n" : ""}${error.message}`);
      }
    } finally {
      if (said) conversation.push({ role: "assistant", content: said });
      else conversation.pop();
      running = null;
      get("send").disabled = false;
      get("stop").hidden = true;
      text.focus();
    }
  };

  get("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  get("stop").addEventListener("click", () => running?.abort());
  get("new").addEventListener("click", () => {
    running?.abort();
    messages = [];
    log.replaceChildren();
    text.focus();
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
  get("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("oallama-key", get("key").value);
    get("key-form").hidden = true;
    start();
  });

  // Models by name; of a router those that are loaded have a state.
  const models = async () => {
    const answer = await fetch("v1/models", { headers: headers() });
    if (!answer.ok) throw new Error(await reason(answer));
    const chosen = model.value;
    const found = (await answer.json()).data;
    model.replaceChildren(...found.map((one) => new Option(one.id.split("/").pop(), one.id, false, one.id === chosen)));
    return found;
  };

  const start = async () => {
    for (;;) {
      try {
        const health = await fetch("health");
        if (health.ok) break;
        say("loading the model");
      } catch {
        say("the server does not answer", true);
      }
      await pause(500);
    }
    try {
      await models();
      say("ready");
    } catch (error) {
      say(error.message, true);
    }
  };

  // Numbers of /metrics by name, without labels; those of several labels are added.
  const metrics = (words) => {
    const found = {};
    for (const line of words.split("\n")) {
      const match = /^([a-z_:]+)(?:\{[^}]*\})? ([\d.e+-]+)$/i.exec(line);
      if (match) found[match[1]] = (found[match[1]] ?? 0) + Number(match[2]);
    }
    return found;
  };
  const watch = async () => {
    for (;; await pause(3000)) {
      if (document.hidden || !model.value || !get("key-form").hidden) continue;
      try {
        const answer = await fetch(`metrics?model=${encodeURIComponent(model.value)}&autoload=false`, { headers: headers() });
        if (!answer.ok) continue;
        const now = metrics(await answer.text());
        const mean = (tokens, seconds) => (now[seconds] > 0 ? rate(now[tokens] / now[seconds]) : "-");
        get("prompts").textContent = mean("llamacpp:prompt_tokens_total", "llamacpp:prompt_seconds_total");
        get("generation").textContent = mean("llamacpp:tokens_predicted_total", "llamacpp:tokens_predicted_seconds_total");
        const waiting = now["llamacpp:requests_deferred"] ?? 0;
        get("requests").textContent = `${now["llamacpp:requests_processing"] ?? 0} running, ${waiting} waiting`;
        if (state.textContent !== "ready") say("ready");
      } catch {
        say("the server does not answer", true);
      }
    }
  };
  start().then(watch);
})();
