package outbox_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/backoff"
)

// one is a configuration with a single outbox, changed by a test.
func one(change func(*outbox.Outbox)) outbox.Config {
	c := outbox.Config{Outboxes: []outbox.Outbox{{Name: "orders"}}}
	if change != nil {
		change(&c.Outboxes[0])
	}
	return c
}

// with is a valid configuration, changed by a test.
func with(change func(*outbox.Config)) outbox.Config {
	c := one(nil)
	change(&c)
	return c
}

func named(names ...string) []outbox.Outbox {
	list := make([]outbox.Outbox, len(names))
	for i, n := range names {
		list[i].Name = n
	}
	return list
}

var discard = outbox.Each(func(context.Context, outbox.Envelope) error { return nil })

func listen(context.Context) (*pgx.Conn, error) { return nil, context.Canceled }

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 64)
	tests := map[string]struct {
		config outbox.Config
		want   string // part of the error
	}{
		"no outbox": {outbox.Config{}, "Config.Outboxes is empty; it must have at least one"},
		"instance name": {
			with(func(c *outbox.Config) { c.Name = "a\nb" }),
			`Config.Name is "a\nb"; it must be valid UTF-8 without control characters`,
		},
		"long instance name": {
			with(func(c *outbox.Config) { c.Name = strings.Repeat("n", 101) }),
			"Config.Name has 101 bytes; it must have at most 100",
		},
		"notify mode": {
			with(func(c *outbox.Config) { c.Notify = 3 }),
			"Config.Notify is 3; it must be AfterCommit, InTransaction or Off",
		},

		"no default": {
			outbox.Config{Outboxes: named("a", "b")},
			`Config.DefaultOutbox is empty although there are 2 outboxes; it must be one of "a", "b", or NoDefault`,
		},
		"unknown default": {
			with(func(c *outbox.Config) { c.DefaultOutbox = "other" }),
			`Config.DefaultOutbox is "other"; it must be one of "orders"`,
		},

		"poll too quick": {
			with(func(c *outbox.Config) { c.PollInterval = time.Millisecond }),
			"Config.PollInterval is 1ms; it must be from 10ms to 24h0m0s",
		},
		"negative stop timeout": {
			with(func(c *outbox.Config) { c.StopTimeout = -1 }),
			"Config.StopTimeout is -1ns; it must be positive",
		},
		"negative deliveries": {
			with(func(c *outbox.Config) { c.MaxDeliveries = -2 }),
			"Config.MaxDeliveries is -2; it must be positive",
		},

		"two ways to listen": {
			with(func(c *outbox.Config) { c.ListenDSN, c.Listen = "host=localhost", listen }),
			"Config.ListenDSN and Config.Listen are both set",
		},
		"listen while off": {
			with(func(c *outbox.Config) { c.Notify, c.Listen = outbox.Off, listen }),
			"Config.Notify is Off, so that ListenDSN and Listen must not be set",
		},
		"bad DSN": {
			with(func(c *outbox.Config) { c.ListenDSN = "port=none" }),
			"Config.ListenDSN must be a PostgreSQL connection string",
		},

		"relay for nobody": {
			with(func(c *outbox.Config) { c.Relays = map[string]outbox.Relay{"odrers": discard} }),
			`Config.Relays["odrers"] is for an outbox that is not configured; it must be one of "orders"`,
		},
		"nil relay": {
			with(func(c *outbox.Config) { c.Relays = map[string]outbox.Relay{"orders": nil} }),
			`Config.Relays["orders"] is nil`,
		},
		"two relays": {with(func(c *outbox.Config) {
			c.Outboxes[0].Relay, c.Relays = discard, map[string]outbox.Relay{"orders": discard}
		}), `Config.Outboxes[0] ("orders").Relay and Config.Relays["orders"] are both set`},

		"outbox without name": {outbox.Config{Outboxes: named("")}, `Config.Outboxes[0] ("").Name is empty`},
		"outbox with long name": {
			outbox.Config{Outboxes: named(strings.Repeat("o", 101))},
			".Name has 101 bytes; it must have at most 100",
		},
		"outbox with NUL": {outbox.Config{Outboxes: named("a\x00")}, "without control characters"},
		"two of one name": {
			outbox.Config{Outboxes: named("a", "b", "a"), DefaultOutbox: "b"},
			`Config.Outboxes[2] ("a").Name is also that of Config.Outboxes[0]`,
		},

		"negative partitions": {
			one(func(o *outbox.Outbox) { o.Partitions = -1 }),
			`Config.Outboxes[0] ("orders").Partitions is -1; it must be from 1 to 10000, or 0`,
		},
		"too many partitions": {
			one(func(o *outbox.Outbox) { o.Partitions = 10_001 }),
			"Partitions is 10001; it must be from 1 to 10000",
		},
		"total with partitions": {
			one(func(o *outbox.Outbox) { o.Ordering, o.Partitions = outbox.Total, 2 }),
			"Partitions is 2 although Ordering is Total; it must be 1",
		},
		"ordering": {
			one(func(o *outbox.Outbox) { o.Ordering = 7 }),
			"Ordering is 7; it must be ByGroup, Total or None",
		},
		"after dead": {
			one(func(o *outbox.Outbox) { o.AfterDead = -1 }),
			"AfterDead is -1; it must be Continue or HoldGroup",
		},
		"hold without order": {
			one(func(o *outbox.Outbox) { o.AfterDead, o.Ordering = outbox.HoldGroup, outbox.None }),
			"AfterDead is HoldGroup although Ordering is None",
		},

		"batch size": {
			one(func(o *outbox.Outbox) { o.BatchSize = 10_001 }),
			"BatchSize is 10001; it must be from 1 to 10000",
		},
		"batch bytes": {
			one(func(o *outbox.Outbox) { o.MaxBatchBytes = -1 }),
			"MaxBatchBytes is -1; it must be positive",
		},
		"deliver timeout": {
			one(func(o *outbox.Outbox) { o.DeliverTimeout = 2 * time.Hour }),
			"DeliverTimeout is 2h0m0s; it must be positive and at most 1h0m0s",
		},
		"backoff": {
			one(func(o *outbox.Outbox) { o.Backoff = backoff.Constant(-1) }),
			"Backoff is not valid: backoff: Constant -1ns is negative",
		},
		"attempts": {
			one(func(o *outbox.Outbox) { o.MaxAttempts = -1 }),
			"MaxAttempts is -1; it must be positive, or 0 for no bound",
		},
		"give up": {
			one(func(o *outbox.Outbox) { o.GiveUpAfter = -time.Second }),
			"GiveUpAfter is -1s; it must be positive, or 0 for no bound",
		},
		"dead retention": {
			one(func(o *outbox.Outbox) { o.DeadRetention = -time.Second }),
			"DeadRetention is -1s; it must be positive, or 0 for ever",
		},

		// C13: a name that would be truncated.
		"long table": {
			with(func(c *outbox.Config) { c.Table = long }),
			"Config.Table is not valid: table name \"" + long + "\" has 64 bytes; the database would cut it to 63",
		},
		"long outbox table": {
			one(func(o *outbox.Outbox) { o.Table = long }),
			`Config.Outboxes[0] ("orders").Table is not valid: table name`,
		},
		"long schema":      {with(func(c *outbox.Config) { c.Schema = long }), "schema name \"" + long + "\" has 64 bytes"},
		"table of another": {one(func(o *outbox.Outbox) { o.Table = "outboxer_messages" }), ""},
		"meta table of another": {outbox.Config{
			Outboxes:      []outbox.Outbox{{Name: "a", Table: "m"}, {Name: "b", Table: "m_meta"}},
			DefaultOutbox: "a",
		}, `Config.Outboxes[1] ("b").Table is "m_meta"; it must not be the table that belongs to "m"`},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := outbox.New(tt.config)
			if tt.want == "" {
				if err != nil {
					t.Fatalf("New: %v", err)
				}
				return
			}
			if err == nil {
				t.Fatalf("New accepted it; want an error with %q", tt.want)
			}
			if !strings.HasPrefix(err.Error(), "outbox: Config.") || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("New: %v\nwant %q", err, tt.want)
			}
		})
	}
}

func TestNewTellsAllProblemsAtOnce(t *testing.T) {
	t.Parallel()
	c := one(func(o *outbox.Outbox) { o.Partitions, o.BatchSize = -1, -1 })
	c.MaxDeliveries = -1
	_, err := outbox.New(c)
	if err == nil {
		t.Fatal("New accepted it")
	}
	for _, field := range []string{"Partitions", "BatchSize", "MaxDeliveries"} {
		if !strings.Contains(err.Error(), field) {
			t.Errorf("the error says nothing of %s: %v", field, err)
		}
	}
}

func TestNewAcceptsBounds(t *testing.T) {
	t.Parallel()
	tests := map[string]outbox.Config{
		"least": {Outboxes: named("o")},
		"most": {
			Outboxes: []outbox.Outbox{{
				Name: strings.Repeat("ö", 50), Table: strings.Repeat("t", 63), Relay: discard,
				Partitions: 10_000, BatchSize: 10_000, MaxBatchBytes: 1, DeliverTimeout: time.Hour,
			}},
			Name: strings.Repeat("n", 100), Table: strings.Repeat("t", 63), Schema: strings.Repeat("s", 63),
			PollInterval: 24 * time.Hour, StopTimeout: 24 * time.Hour,
		},
		"several with a default":    {Outboxes: named("a", "b"), DefaultOutbox: "b"},
		"several without a default": {Outboxes: named("a", "b"), DefaultOutbox: outbox.NoDefault},
		"total": {Outboxes: []outbox.Outbox{{
			Name: "o", Ordering: outbox.Total, Partitions: 1, AfterDead: outbox.HoldGroup, MaxAttempts: 1,
		}}},
		"percent in names": {Outboxes: named("100%d"), Relays: map[string]outbox.Relay{"100%d": outbox.Elsewhere}},
	}
	for name, c := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, err := outbox.New(c); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestErrorsQuoteNamesWithPercentSigns(t *testing.T) {
	t.Parallel()
	_, err := outbox.New(outbox.Config{Outboxes: []outbox.Outbox{{Name: "100%d", Partitions: -1}}})
	if err == nil || !strings.Contains(err.Error(), `("100%d").Partitions is -1;`) {
		t.Errorf("New: %v", err)
	}
}

func TestNewKeepsNoReferenceToItsConfig(t *testing.T) {
	t.Parallel()
	c := outbox.Config{Outboxes: named("orders")}
	in, err := outbox.New(c)
	if err != nil {
		t.Fatal(err)
	}
	c.Outboxes[0].Name = "changed"
	// An unknown outbox is refused with the known names.
	_, err = in.Drain(t.Context(), "changed")
	if err == nil {
		t.Error("the instance follows the slice of its caller")
	}
}

func TestPluginName(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{"": "gormoutbox", "billing": "gormoutbox:billing"} {
		in, err := outbox.New(with(func(c *outbox.Config) { c.Name = name }))
		if err != nil {
			t.Fatal(err)
		}
		if got := in.Name(); got != want {
			t.Errorf("Name of %q = %q, want %q", name, got, want)
		}
	}
}
