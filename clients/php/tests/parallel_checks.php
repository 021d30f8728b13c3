<?php

declare(strict_types=1);

// Makes checks and prints how many were admitted. Arguments: SOCKET CALLS CLIENT.

require __DIR__ . '/bootstrap.php';

[, $socket, $calls, $client] = $argv;
if ($client === 'phpredis') {
    $redis = new Redis();
    $redis->connect($socket);
} else {
    $redis = new Predis\Client(['scheme' => 'unix', 'path' => $socket]);
}
$limiter = new Tidegate\RedisLimiter($redis, deadline: 30.0, onError: 'raise');
$admitted = 0;
for ($call = 0; $call < (int) $calls; $call++) {
    $admitted += (int) $limiter->check('parallel', ['50/h', '1000/day'])->allowed;
}
echo "$admitted\n";
