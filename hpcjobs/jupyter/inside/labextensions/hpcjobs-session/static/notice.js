// In the page of a session (JupyterLab 4, Notebook 7): shows what the session has to say, and saves what is open.
// It is an extension that needs no build: it uses the application's commands alone, and shares no module with it.
(() => {
  const EVERY_MS = 5000;

  async function newest(settings) {
    const headers = settings.token ? { Authorization: `token ${settings.token}` } : {};
    const answer = await fetch(`${settings.baseUrl}hpcjobs/session`, { headers, credentials: 'same-origin' });
    return answer.ok ? (await answer.json()).notice : null;
  }

  function activate(app) {
    let seen = null;
    const look = async () => {
      const notice = await newest(app.serviceManager.serverSettings).catch(() => null); // a server that has ended
      if (!notice || notice.number === seen) return;
      seen = notice.number;
      await app.commands.execute('docmanager:save-all');
      await app.commands.execute('apputils:notify', {
        message: notice.text, type: 'warning', options: { autoClose: false },
      });
    };
    setInterval(look, EVERY_MS);
  }

  const plugin = { id: 'hpcjobs-session:notice', autoStart: true, activate };
  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB['hpcjobs-session'] = {
    init: () => undefined,
    get: () => Promise.resolve(() => ({ __esModule: true, default: plugin })),
  };
})();
