// ioredis with the RESP listener: node ioredis.js PORT
const Redis = require("ioredis");

(async () => {
  const redis = new Redis(Number(process.argv[2]), "127.0.0.1", { maxRetriesPerRequest: 0, connectionName: "ioredis" });
  redis.on("error", (error) => { console.error(error); process.exit(1); });
  const replies = { pong: await redis.ping() };
  replies.check = (await redis.call("TIDEGATE.CHECK", "ioredis", "5/h")).slice(0, 4);
  replies.throttle = await redis.call("CL.THROTTLE", "ioredis", "1", "1", "3600");
  replies.error = await redis.call("TIDEGATE.CHECK", "ioredis", "5/fortnight").catch((error) => error.message);

  const checks = redis.pipeline();
  for (let n = 0; n < 100; n++) checks.call("TIDEGATE.CHECK", "ioredis:pipeline", "37/h");
  replies.admitted = (await checks.exec()).filter(([error, [allowed]]) => error === null && allowed === 1).length;

  const throttles = redis.pipeline();
  for (let n = 0; n < 100; n++) throttles.call("CL.THROTTLE", "ioredis:pipeline", "18", "1", "3600");
  replies.throttled = (await throttles.exec()).filter(([error, [limited]]) => error === null && limited === 1).length;

  console.log(JSON.stringify(replies));
  await redis.quit();
})();
