package outbox

import (
	"context"
	"reflect"
	"testing"
	"time"

	"github.com/gormoutbox/outbox/backoff"
	"github.com/gormoutbox/outbox/internal/testdb"
)

// Every setting of an outbox that the engine knows reaches it.
func TestEngineGetsWhatOutboxesSay(t *testing.T) {
	t.Parallel()
	o := Outbox{
		Name:           "orders",
		Relay:          Each(func(context.Context, Envelope) error { return nil }),
		Ordering:       Total,
		BatchSize:      1,
		MaxBatchBytes:  2,
		DeliverTimeout: 3,
		Backoff:        backoff.Constant(4),
		MaxAttempts:    5,
		GiveUpAfter:    6,
		AfterDead:      HoldGroup,
		Retention:      Keep(7 * time.Second),
		DeadRetention:  8,
	}
	in, err := New(Config{
		Outboxes: []Outbox{o, {Name: "elsewhere", Relay: Elsewhere}, {Name: "published only"}}, DefaultOutbox: NoDefault,
	})
	if err != nil {
		t.Fatal(err)
	}
	list := in.engineOutboxes()
	if len(list) != 1 {
		t.Fatalf("the engine gets %d outboxes, want the one with a relay", len(list))
	}
	got, want := reflect.ValueOf(list[0]), reflect.ValueOf(o)
	for i := range got.NumField() {
		field := got.Type().Field(i)
		value := want.FieldByName(field.Name)
		if !value.IsValid() || value.IsZero() {
			t.Errorf("the test says nothing of %s", field.Name)
		} else if !reflect.DeepEqual(got.Field(i).Interface(), value.Interface()) {
			t.Errorf("%s = %v, want %v", field.Name, got.Field(i), value)
		}
	}
}

func TestRelayOfConfig(t *testing.T) {
	t.Parallel()
	relay := Each(func(context.Context, Envelope) error { return nil })
	in, err := New(Config{Outboxes: []Outbox{{Name: "orders"}}, Relays: map[string]Relay{"orders": relay}})
	if err != nil {
		t.Fatal(err)
	}
	if in.engineOutboxes()[0].Relay != relay {
		t.Error("the engine does not get the relay of Config.Relays")
	}
}

func TestMaxDeliveries(t *testing.T) {
	t.Parallel()
	pg, lite := testdb.Postgres(t), testdb.SQLite(t)
	tests := []struct{ pool, configured, want int }{
		{2, 0, 1}, {3, 0, 1}, {10, 0, 5}, {10, 9, 9}, {0, 0, 0}, {0, 50, 50},
	}
	for _, tt := range tests {
		in := &Instance{config: Config{MaxDeliveries: tt.configured}}
		b := &binding{dialect: "postgres", pool: pg.SQL(t, testdb.PoolSize(tt.pool))}
		if got, err := in.maxDeliveries(b); got != tt.want || err != nil {
			t.Errorf("maxDeliveries of %+v = %d, %v", tt, got, err)
		}
	}
	in := &Instance{config: Config{MaxDeliveries: 7}}
	if got, err := in.maxDeliveries(&binding{dialect: "sqlite", pool: lite.SQL(t, testdb.PoolSize(1))}); got != 7 || err != nil {
		t.Errorf("maxDeliveries on SQLite with one connection = %d, %v", got, err)
	}
}

// The listener's connection is like those of the pool, but no one of them.
func TestConnectLikeThePool(t *testing.T) {
	t.Parallel()
	pool := testdb.Postgres(t).SQL(t, testdb.PoolSize(2))
	in := &Instance{}
	connect, err := in.connect(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	var ours, pools string
	const query = "SELECT current_schema() || ' ' || current_user"
	if err := conn.QueryRow(t.Context(), query).Scan(&ours); err != nil {
		t.Fatal(err)
	}
	if err := pool.QueryRowContext(t.Context(), query).Scan(&pools); err != nil {
		t.Fatal(err)
	}
	if ours != pools {
		t.Errorf("the listener is %q, the pool %q", ours, pools)
	}
	if n := pool.Stats().InUse; n != 0 {
		t.Errorf("%d connections of the pool are taken", n)
	}
}

func TestConnectNeedsPgx(t *testing.T) {
	t.Parallel()
	in := &Instance{}
	connect, err := in.connect(t.Context(), testdb.SQLite(t).SQL(t))
	if connect != nil || err != nil {
		t.Errorf("connect of a pool without pgx gave a function (%v) or an error: %v", connect != nil, err)
	}
}
