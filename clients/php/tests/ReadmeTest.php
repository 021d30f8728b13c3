<?php

declare(strict_types=1);

namespace Tollgate\Tests;

use PHPUnit\Framework\TestCase;

final class ReadmeTest extends TestCase
{
    public function testFirstProgramWorks(): void
    {
        [$service, $address] = Servers::tollgate();
        preg_match('/```php\n(<\?php.*?)```/s', (string) file_get_contents(__DIR__ . '/../README.md'), $match);
        $program = str_replace(["127.0.0.1:8080'", '__DIR__'], ["$address', 30.0", var_export(dirname(__DIR__), true)], $match[1]);
        $run = static function () use ($program): string {
            $file = (string) tempnam(sys_get_temp_dir(), 'tollgate');
            file_put_contents($file, $program);
            $line = (new Process([PHP_BINARY, $file]))->awaitOutput('/^(.*)$/');
            unlink($file);
            return $line;
        };
        for ($left = 9; $left >= 0; $left--) {
            self::assertSame("$left of 10 left", $run());
        }
        self::assertMatchesRegularExpression('/^denied; retry in \d+(\.\d+)? seconds$/', $run());
    }
}
