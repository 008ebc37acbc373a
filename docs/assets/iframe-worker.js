// Browsers start no workers for pages opened from a folder (file://). There, the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #inside;

    constructor(url) {
      super();
      this.#inside = new Promise((resolve) => {
        const frame = document.createElement("iframe");
        frame.hidden = true;
        frame.addEventListener("load", () => {
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inside.document.createElement("script");
          script.src = url;
          script.onload = () => resolve(inside);
          inside.document.body.append(script);
        }, { once: true });
        document.documentElement.append(frame);
      });
    }

    postMessage(data) {
      this.#inside.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
  };
}
