// Markdown of model answers as DOM nodes. Model text only ever becomes text nodes and a fixed set of elements:
// nothing is parsed as HTML, links are shown but only http(s) and mailto ones can be followed.

const el = (name, ...children) => {
  const node = document.createElement(name);
  node.append(...children);
  return node;
};

const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*([^\s*](?:[\s\S]*?[^\s])?)\*\*|__([^\s_](?:[\s\S]*?[^\s])?)__(?!\w)|\*([^\s*](?:[^*]*[^\s*])?)\*|~~([^~]+)~~|\[([^\]\n]+)\]\(([^()\s]+)\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"])/g;

// Inline markup of one paragraph, as an array of nodes and strings.
function inline(text, depth = 0) {
  if (depth > 6) return [text];
  const out = [];
  let last = 0;
  for (const m of text.matchAll(INLINE)) {
    out.push(text.slice(last, m.index));
    last = m.index + m[0].length;
    if (m[2] !== undefined) out.push(el("code", m[2].trim() || m[2]));
    else if (m[3] ?? m[4]) out.push(el("strong", ...inline(m[3] ?? m[4], depth + 1)));
    else if (m[5]) out.push(el("em", ...inline(m[5], depth + 1)));
    else if (m[6]) out.push(el("del", ...inline(m[6], depth + 1)));
    else out.push(link(m[8] ?? m[9], m[7] ? inline(m[7], depth + 1) : [m[9]]));
  }
  out.push(text.slice(last));
  return out.filter((part) => part !== "");
}

function link(target, children) {
  if (!/^(https?:|mailto:)/i.test(target)) return el("span", ...children, ` (${target})`);
  const a = el("a", ...children);
  a.href = target;
  a.rel = "noopener noreferrer nofollow";
  a.target = "_blank";
  return a;
}

function codeBlock(lines, language) {
  const code = el("code", lines.join("\n"));
  const pre = el("pre", code);
  if (language) pre.setAttribute("aria-label", `${language} code`);
  pre.tabIndex = 0;
  const copy = el("button", "Copy");
  copy.type = "button";
  copy.addEventListener("click", () => {
    navigator.clipboard?.writeText(code.textContent).then(() => { copy.textContent = "Copied"; });
  });
  pre.append(copy);
  return pre;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((c) => c.trim());
const row = (kind, line) => el("tr", ...cells(line).map((c) => el(kind, ...inline(c))));

// A list starting at lines[i]; nested lists are indented further. Returns [node, next line].
function list(lines, i, depth) {
  const item = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
  const first = lines[i].match(item);
  const indent = first[1].length;
  const ordered = /\d/.test(first[2]);
  const node = el(ordered ? "ol" : "ul");
  if (ordered && parseInt(first[2], 10) !== 1) node.start = parseInt(first[2], 10);
  while (i < lines.length) {
    const m = lines[i].match(item);
    if (!m || m[1].length < indent || /\d/.test(m[2]) !== ordered) {
      if (m || !/^\s+\S/.test(lines[i]) || !node.lastChild) break;
      node.lastChild.append(" ", ...inline(lines[i].trim()));
      i += 1;
    } else if (m[1].length > indent + 1 && node.lastChild && depth < 8) {
      const [nested, next] = list(lines, i, depth + 1);
      node.lastChild.append(nested);
      i = next;
    } else {
      node.append(el("li", ...inline(m[3])));
      i += 1;
    }
  }
  return [node, i];
}

// The nodes of a Markdown text. Works on unfinished text: an open code fence runs to the end.
export function markdown(text, depth = 0) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const out = [];
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    const fence = line.match(/^\s{0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/);
    const heading = line.match(/^\s{0,3}(#{1,6})\s+(.*?)\s*#*$/);
    if (!line.trim()) {
      i += 1;
    } else if (fence) {
      const body = [];
      const close = new RegExp(`^\\s{0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
      for (i += 1; i < lines.length && !close.test(lines[i]); i += 1) body.push(lines[i]);
      i += 1;
      out.push(codeBlock(body, fence[2]));
    } else if (heading) {
      // The page's own headings are h1 and h2; the answer's start below them.
      out.push(el(`h${Math.min(6, heading[1].length + 2)}`, ...inline(heading[2])));
      i += 1;
    } else if (/^\s{0,3}([-*_])(\s*\1){2,}\s*$/.test(line)) {
      out.push(el("hr"));
      i += 1;
    } else if (/^\s{0,3}>/.test(line) && depth < 6) {
      const body = [];
      for (; i < lines.length && /^\s{0,3}>/.test(lines[i]); i += 1) body.push(lines[i].replace(/^\s{0,3}> ?/, ""));
      out.push(el("blockquote", ...markdown(body.join("\n"), depth + 1)));
    } else if (/^\s*([-*+]|\d{1,9}[.)])\s+\S/.test(line)) {
      const [node, next] = list(lines, i, 0);
      out.push(node);
      i = next;
    } else if (line.includes("|") && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(lines[i + 1] ?? "") && lines[i + 1].includes("-")) {
      const body = el("tbody");
      const table = el("table", el("thead", row("th", line)), body);
      for (i += 2; i < lines.length && lines[i].includes("|") && lines[i].trim(); i += 1) body.append(row("td", lines[i]));
      out.push(table);
    } else {
      const body = [line];
      const starts = /^\s{0,3}(#{1,6}\s|`{3,}|~{3,}|>)|^\s*([-*+]|\d{1,9}[.)])\s+\S/;
      for (i += 1; i < lines.length && lines[i].trim() && !starts.test(lines[i]); i += 1) body.push(lines[i]);
      const p = el("p");
      body.forEach((text, n) => p.append(...(n ? [el("br")] : []), ...inline(text)));
      out.push(p);
    }
  }
  return out;
}
