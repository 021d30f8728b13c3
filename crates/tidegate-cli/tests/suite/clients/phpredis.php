<?php
// phpredis with the RESP listener: php phpredis.php PORT

$redis = new Redis();
$redis->connect("127.0.0.1", (int) $argv[1], 30);
$replies = ["pong" => $redis->ping() ? "PONG" : "no reply"];
$replies["check"] = array_slice($redis->rawCommand("TIDEGATE.CHECK", "phpredis", "5/h"), 0, 4);
$replies["throttle"] = $redis->rawCommand("CL.THROTTLE", "phpredis", "1", "1", "3600");
$redis->rawCommand("TIDEGATE.CHECK", "phpredis", "5/fortnight");
$replies["error"] = $redis->getLastError();

$checks = $redis->pipeline();
for ($n = 0; $n < 100; $n++) {
    $checks->rawCommand("TIDEGATE.CHECK", "phpredis:pipeline", "37/h");
}
$replies["admitted"] = array_sum(array_column($checks->exec(), 0));

$throttles = $redis->pipeline();
for ($n = 0; $n < 100; $n++) {
    $throttles->rawCommand("CL.THROTTLE", "phpredis:pipeline", "18", "1", "3600");
}
$replies["throttled"] = array_sum(array_column($throttles->exec(), 0));

echo json_encode($replies), "\n";
$redis->close();
