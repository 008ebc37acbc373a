// What a test asks of the live page: an object of two functions.
({
  // Every text that can be seen: [words, element's id or class, left, top, right, bottom, contrast], by the boxes of its
  // lines, as far as whatever scrolls around it lets them be seen.
  texts() {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const known = new Map();
    const rgba = (color) => {
      if (!known.has(color)) {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        known.set(color, canvas.getImageData(0, 0, 1, 1).data);
      }
      return known.get(color);
    };
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const light = (color) => {
      const [r, g, b] = [...rgba(color)].map((value) => linear(value / 255));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const whole = { left: -1e9, top: -1e9, right: 1e9, bottom: 1e9 };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const element = node.parentElement;
      if (!node.data.trim() || element.closest("noscript, script")) continue;
      if (!element.checkVisibility({ visibilityProperty: true })) continue;
      let behind = "rgba(0, 0, 0, 0)";
      for (let each = element; each && rgba(behind)[3] === 0; each = each.parentElement) {
        behind = getComputedStyle(each).backgroundColor;
      }
      const [a, b] = [light(getComputedStyle(element).color), light(behind)];
      const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      const clip = element.closest(".scroll, #events, #heat")?.getBoundingClientRect() ?? whole;
      const range = document.createRange();
      range.selectNodeContents(node);
      for (const box of range.getClientRects()) {
        const [left, right] = [Math.max(box.left, clip.left), Math.min(box.right, clip.right)];
        const [top, bottom] = [Math.max(box.top, clip.top), Math.min(box.bottom, clip.bottom)];
        if (right - left < 1 || bottom - top < 1) continue;
        found.push([node.data.trim(), element.id || element.className, left, top, right, bottom, contrast]);
      }
    }
    return found;
  },

  // How many pixels of a chart are of a color of its series.
  drawn(id) {
    const canvas = document.querySelector(`#${id} canvas`);
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    const pixels = copy.getImageData(0, 0, canvas.width, canvas.height).data;
    const swatches = [...document.querySelectorAll(`#${id} .legend i`)];
    const colors = swatches.map((each) => getComputedStyle(each).backgroundColor.match(/\d+/g).map(Number));
    let found = 0;
    for (let at = 0; at < pixels.length; at += 4) {
      if (colors.some((rgb) => rgb.slice(0, 3).every((value, index) => pixels[at + index] === value))) found++;
    }
    return found;
  },
})
