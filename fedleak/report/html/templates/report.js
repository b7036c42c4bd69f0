"use strict";
// Shows the private texts page by page: search, filter, order, and the words that differ.
// Texts are written as text nodes only, never as markup.
(() => {
  // On paper nothing can be opened.
  const openAll = () => {
    for (const part of document.querySelectorAll("details")) part.open = true;
  };
  addEventListener("beforeprint", openAll);
  const data = document.getElementById("data");
  if (!data) return;
  const texts = JSON.parse(data.textContent);
  const SCREEN = 20, PAPER = 200, MOST_PAIRS = 60000;
  const byId = (id) => document.getElementById(id);
  const [search, show, order, found, list] = ["search", "show", "order", "found", "list"].map(byId);
  const [previous, next, pageName] = ["previous", "next", "page"].map(byId);

  const kind = (text) => text.answers[0].exact ? "exact"
    : text.answers.some((answer) => answer.text !== null) ? "part" : "none";
  const KINDS = { exact: "read word for word", part: "not word for word", none: "no answer" };
  let haystacks = null;
  const haystack = (number) => {
    // Made at the first search, and once.
    haystacks ??= texts.map((text) => [
      text.truth, `round ${text.round} client ${text.client}`,
      ...text.answers.flatMap((answer) => [answer.attack, answer.text ?? ""]),
    ].join("\n").toLowerCase());
    return haystacks[number];
  };
  const client = (text) => text.client === "all" ? -1 : Number(text.client);

  let chosen = [], at = 0, size = SCREEN;
  function choose() {
    const wanted = search.value.trim().toLowerCase();
    chosen = texts.map((_, number) => number).filter((number) =>
      (show.value === "all" || kind(texts[number]) === show.value)
      && (wanted === "" || haystack(number).includes(wanted)));
    if (order.value === "place") {
      chosen.sort((a, b) => texts[a].round - texts[b].round
        || client(texts[a]) - client(texts[b]) || a - b);
    }
    at = 0;
    draw();
  }

  function draw() {
    const pages = Math.max(1, Math.ceil(chosen.length / size));
    const some = chosen.slice(at * size, (at + 1) * size);
    list.replaceChildren(...some.map((number) => item(texts[number])));
    const count = (n) => n.toLocaleString("en");
    found.textContent = `${count(chosen.length)} of ${count(texts.length)} texts`
      + (chosen.length ? `; page ${count(at + 1)} of ${count(pages)}` : "");
    pageName.textContent = `${count(at + 1)} of ${count(pages)}`;
    previous.disabled = at === 0;
    next.disabled = at >= pages - 1;
  }

  function element(name, kind, ...inside) {
    const made = document.createElement(name);
    if (kind) made.className = kind;
    made.append(...inside);
    return made;
  }

  function item(text) {
    const [best, ...others] = text.answers, of = kind(text);
    const words = `Round ${text.round}, ${text.client === "all" ? "all clients" : `client ${text.client}`}`;
    const head = element("p", "where", words, element("span", `badge ${of}`, KINDS[of]));
    if (best.proved) head.append(element("span", "badge", "proved"));
    const [truth, answer] = marked(text.truth, best.text);
    const parts = [head, pair("private", truth), pair(best.attack, answer, evidence(best))];
    if (others.length) {
      const rest = element("details", "", element("summary", "", others.length === 1
        ? "1 other attack" : `${others.length} other attacks`));
      const fill = () => {
        if (rest.childElementCount > 1) return;
        rest.append(...others.map((other) =>
          pair(other.attack, marked(text.truth, other.text)[1], evidence(other))));
      };
      // Words are compared when somebody looks; paper does not wait for the event.
      if (size === PAPER) fill();
      rest.addEventListener("toggle", fill);
      parts.push(rest);
    }
    return element("li", "", ...parts);
  }

  function pair(who, what, how = "") {
    const made = element("div", "pair", element("div", "who", who), element("div", "what", ...what));
    if (how) made.append(element("div", "how", how));
    return made;
  }

  function evidence(answer) {
    return [
      answer.text === null ? "" : answer.exact ? "word for word" : `ROUGE-L ${Math.round(answer.rougeL)}`,
      answer.tokens === null || answer.exact ? "" : `${Math.round(100 * answer.tokens)} % of the tokens found`,
      answer.proved ? "the whole batch is proved" : "not proved",
      answer.margin === null ? "" : `smallest margin of the batch ${answer.margin}`,
    ].filter(Boolean).join(" · ");
  }

  // Returns both texts as nodes; words that the other has not, in order, are marked.
  function marked(truth, answer) {
    if (answer === null) return [[truth], ["no text named"]];
    const left = truth.split(/\s+/), right = answer.split(/\s+/);
    const [keepLeft, keepRight] = left.length * right.length <= MOST_PAIRS
      ? inOrder(left, right) : anyOrder(left, right);
    return [nodes(left, keepLeft, "u", "missed"), nodes(right, keepRight, "del", "")];
  }

  // The longest common subsequence of words.
  function inOrder(left, right) {
    const width = right.length + 1;
    const length = new Uint16Array((left.length + 1) * width);
    for (let i = left.length - 1; i >= 0; i--) {
      for (let j = right.length - 1; j >= 0; j--) {
        length[i * width + j] = left[i] === right[j] ? length[(i + 1) * width + j + 1] + 1
          : Math.max(length[(i + 1) * width + j], length[i * width + j + 1]);
      }
    }
    const keepLeft = left.map(() => false), keepRight = right.map(() => false);
    for (let i = 0, j = 0; i < left.length && j < right.length;) {
      if (left[i] === right[j]) keepLeft[i++] = keepRight[j++] = true;
      else if (length[(i + 1) * width + j] >= length[i * width + j + 1]) i++;
      else j++;
    }
    return [keepLeft, keepRight];
  }

  // Of long texts: whether the other has the word at all.
  function anyOrder(left, right) {
    const ofLeft = new Set(left), ofRight = new Set(right);
    return [left.map((word) => ofRight.has(word)), right.map((word) => ofLeft.has(word))];
  }

  // Joins neighbours that are marked alike.
  function nodes(words, keep, name, kind) {
    const made = [];
    for (let i = 0; i < words.length;) {
      let end = i;
      while (end < words.length && keep[end] === keep[i]) end++;
      const run = words.slice(i, end).join(" ");
      if (made.length) made.push(" ");
      made.push(keep[i] ? run : element(name, kind, run));
      i = end;
    }
    return made;
  }

  let waiting = 0;
  search.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(choose, 120);
  });
  search.form.addEventListener("submit", (event) => event.preventDefault());
  show.addEventListener("change", choose);
  order.addEventListener("change", choose);
  const turn = (by) => () => {
    at += by;
    draw();
    byId("texts").scrollIntoView();
  };
  previous.addEventListener("click", turn(-1));
  next.addEventListener("click", turn(1));
  const resize = (to) => {
    at = Math.floor(at * size / to);
    size = to;
    draw();
  };
  addEventListener("beforeprint", () => {
    resize(PAPER);
    openAll();
  });
  addEventListener("afterprint", () => resize(SCREEN));
  byId("browser").hidden = false;
  choose();
})();
