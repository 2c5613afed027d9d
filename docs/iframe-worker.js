// A page opened from the disk may start no worker, and the theme's search is one. Here an invisible frame stands in for
// it: the theme knows such frames by the name IFrameWorker, and would otherwise load this script from another host.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(address) {
      super();
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const page = this.frame.contentDocument;
      page.open();
      page.write("<html><body></body></html>");
      page.close();
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.receive(data);
      inside.importScripts = (...addresses) =>
        addresses.reduce((done, each) => done.then(() => this.load(each)), Promise.resolve());
      this.loaded = this.load(address);
    }

    load(address) {
      return new Promise((resolve, reject) => {
        const script = this.frame.contentDocument.createElement("script");
        script.src = address;
        script.onload = resolve;
        script.onerror = () => reject(new Error(`${address} cannot be loaded`));
        this.frame.contentDocument.body.appendChild(script);
      });
    }

    postMessage(data) {
      const Message = this.frame.contentWindow.MessageEvent;
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new Message("message", { data })));
    }

    receive(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
