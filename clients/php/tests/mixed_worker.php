<?php

declare(strict_types=1);

// A worker of the mixed run: one of the PHP clients, alongside those of the other languages. The parent,
// crates/tidegate-cli/tests/suite/mixed.rs, describes the arguments, the input and the records.

require __DIR__ . '/bootstrap.php';

$work = json_decode($argv[1], true, flags: JSON_THROW_ON_ERROR);
$options = ['deadline' => 60.0, 'onError' => 'raise'];
if ($work['client'] === 'service') {
    $client = new Tidegate\Client($work['service'], ...$options);
} elseif ($work['client'] === 'phpredis') {
    $redis = new Redis();
    $redis->connect('127.0.0.1', $work['redis_port']);
    $client = new Tidegate\RedisLimiter($redis, ...$options);
} elseif ($work['client'] === 'Predis') {
    $client = new Tidegate\RedisLimiter(new Predis\Client(['host' => '127.0.0.1', 'port' => $work['redis_port']]), ...$options);
} else {
    throw new InvalidArgumentException("unknown client: {$work['client']}");
}

/** Returns the wall clock in microseconds. */
function nowUs(): int
{
    ['sec' => $seconds, 'usec' => $microseconds] = gettimeofday();
    return $seconds * 1_000_000 + $microseconds;
}

$records = fopen($work['records'], 'w');
mt_srand($work['seed']);
echo "ready\n";
fgets(STDIN);
stream_set_blocking(STDIN, false);
for ($made = 1; fgets(STDIN) === false && !feof(STDIN); $made++) {
    $counter = mt_rand(0, $work['keys'] - 1);
    $cost = [1, 1, 1, 2, 3][mt_rand(0, 4)];
    $limits = [$work['limits'][$counter % count($work['limits'])], $work['journal']];
    $sentUs = nowUs();
    $decision = $client->check("client-$counter", $limits, $cost);
    $receivedUs = nowUs();
    [$status, $journal] = $decision->limits;
    $record = [$sentUs, $receivedUs, $counter, $cost, (int) $decision->allowed, $status->remaining];
    fwrite($records, implode(' ', [...$record, $status->retryAfterUs, $journal->remaining, $decision->source]) . "\n");
    if ($made === $work['checks']) {
        echo "made\n";
    }
}
fclose($records);
