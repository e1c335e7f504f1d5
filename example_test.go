package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/glebarez/sqlite"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/gormoutbox/outbox"
)

// tempDB opens a database for an example.
func tempDB() (db *gorm.DB, closeDB func()) {
	dir, err := os.MkdirTemp("", "outbox-example-")
	if err != nil {
		panic(err)
	}
	dsn := filepath.Join(dir, "app.db") + "?_pragma=journal_mode(WAL)&_pragma=busy_timeout(5000)"
	db, err = gorm.Open(sqlite.Open(dsn), &gorm.Config{Logger: logger.Discard})
	if err != nil {
		panic(err)
	}
	return db, func() {
		if pool, err := db.DB(); err == nil {
			_ = pool.Close()
		}
		_ = os.RemoveAll(dir)
	}
}

// use installs an instance with its tables.
func use(db *gorm.DB, c outbox.Config) *outbox.Instance {
	ob, err := outbox.New(c)
	if err != nil {
		panic(err)
	}
	if err := errors.Join(db.Use(ob), outbox.AutoMigrate(db)); err != nil {
		panic(err)
	}
	return ob
}

// printer is a relay that prints.
var printer = outbox.Each(func(_ context.Context, e outbox.Envelope) error {
	fmt.Println(e.Type, string(e.Payload))
	return nil
})

type Order struct {
	ID    int64
	Total int
}

// OrderPlaced is a domain event.
type OrderPlaced struct{ Order Order }

func (e OrderPlaced) OutboxMessage() (outbox.Message, error) {
	return outbox.JSON("order.placed", e.Order, outbox.Group(fmt.Sprint(e.Order.ID)))
}

func Example() {
	db, closeDB := tempDB()
	defer closeDB()
	if err := db.AutoMigrate(&Order{}); err != nil {
		panic(err)
	}

	ctx, cancel := context.WithCancel(context.Background())
	ob, err := outbox.New(outbox.Config{
		Outboxes: []outbox.Outbox{{Name: "orders", Partitions: 4}},
		Relays: map[string]outbox.Relay{"orders": outbox.Each(func(_ context.Context, e outbox.Envelope) error {
			fmt.Println("delivered", e.Type, string(e.Payload))
			cancel() // the example ends here
			return nil
		})},
	})
	if err != nil {
		panic(err)
	}
	if err := db.Use(ob); err != nil {
		panic(err)
	}
	if err := outbox.AutoMigrate(db); err != nil {
		panic(err)
	}

	err = db.Transaction(func(tx *gorm.DB) error {
		order := Order{Total: 42}
		if err := tx.Create(&order).Error; err != nil {
			return err
		}
		return outbox.Add(tx, OrderPlaced{order})
	})
	if err != nil {
		panic(err)
	}
	if err := ob.Run(ctx); err != nil {
		panic(err)
	}
	// Output: delivered order.placed {"ID":1,"Total":42}
}

func ExampleAdd() {
	db, closeDB := tempDB()
	defer closeDB()
	ob := use(db, outbox.Config{Outboxes: []outbox.Outbox{{Name: "orders", Relay: printer}}})

	_ = db.Transaction(func(tx *gorm.DB) error {
		return outbox.Add(tx, outbox.Message{Type: "order.placed", GroupKey: "1", Payload: []byte("kept")})
	})
	_ = db.Transaction(func(tx *gorm.DB) error {
		if err := outbox.Add(tx, outbox.Message{Type: "order.placed", GroupKey: "2", Payload: []byte("undone")}); err != nil {
			return err
		}
		return errors.New("the order cannot be placed")
	})
	fmt.Println(outbox.Add(db, outbox.Message{Type: "order.placed"}) != nil, "outside a transaction it is an error")

	_, _ = ob.Drain(context.Background())
	// Output:
	// true outside a transaction it is an error
	// order.placed kept
}

func ExampleAdd_invalid() {
	db, closeDB := tempDB()
	defer closeDB()
	use(db, outbox.Config{Outboxes: []outbox.Outbox{{Name: "orders"}}})

	err := db.Transaction(func(tx *gorm.DB) error {
		err := outbox.Add(tx, outbox.Message{Type: "order.placed", GroupKey: "a\x00b"})
		fmt.Println(errors.Is(err, outbox.ErrInvalidMessage), err)
		return nil // the transaction is still good
	})
	fmt.Println(err)
	// Output:
	// true outbox: invalid message: event 0 (outbox.Message): type "order.placed": GroupKey has a NUL at byte 1; it must have none
	// <nil>
}

func ExampleAddReturning() {
	db, closeDB := tempDB()
	defer closeDB()
	use(db, outbox.Config{Outboxes: []outbox.Outbox{{Name: "orders"}}})

	_ = db.Transaction(func(tx *gorm.DB) error {
		stored, err := outbox.AddReturning(tx, outbox.NewEvent("order.placed", 1), outbox.NewEvent("order.placed", 2))
		for _, e := range stored {
			fmt.Println(e.ID, e.Outbox, string(e.Payload))
		}
		return err
	})
	// Output:
	// 1 orders 1
	// 2 orders 2
}

func ExampleNewEvent() {
	event := outbox.NewEvent("mail.requested", map[string]string{"to": "ann@example.com"},
		outbox.To("mails"), outbox.Header("tenant", "acme"), outbox.After(time.Hour))
	m, err := event.OutboxMessage()
	fmt.Println(m.Outbox, m.Type, string(m.Payload), m.Headers["tenant"], m.Delay, err)
	// Output: mails mail.requested {"to":"ann@example.com"} acme 1h0m0s <nil>
}

func ExampleEvents() {
	db, closeDB := tempDB()
	defer closeDB()
	ob := use(db, outbox.Config{Outboxes: []outbox.Outbox{{Name: "orders", Relay: printer, Ordering: outbox.Total}}})

	placed := []OrderPlaced{{Order{1, 10}}, {Order{2, 20}}}
	_ = db.Transaction(func(tx *gorm.DB) error {
		return outbox.Add(tx, outbox.Events(placed)...)
	})
	_, _ = ob.Drain(context.Background())
	// Output:
	// order.placed {"ID":1,"Total":10}
	// order.placed {"ID":2,"Total":20}
}

func ExampleNew() {
	_, err := outbox.New(outbox.Config{
		Outboxes: []outbox.Outbox{{Name: "orders", Partitions: -1}, {Name: "audit"}},
	})
	fmt.Println(err)
	// Output:
	// outbox: Config.DefaultOutbox is empty although there are 2 outboxes; it must be one of "orders", "audit", or NoDefault if messages name theirs
	// outbox: Config.Outboxes[0] ("orders").Partitions is -1; it must be from 1 to 10000, or 0 for what the database records
}

func ExampleConfig_beforeAdd() {
	type tenant struct{}
	db, closeDB := tempDB()
	defer closeDB()
	ob := use(db, outbox.Config{
		Outboxes: []outbox.Outbox{{Name: "orders", Relay: outbox.Each(func(_ context.Context, e outbox.Envelope) error {
			fmt.Println(e.Type, e.Headers["tenant"])
			return nil
		})}},
		BeforeAdd: func(ctx context.Context, m *outbox.Message) error {
			m.Headers["tenant"] = ctx.Value(tenant{}).(string)
			return nil
		},
	})

	ctx := context.WithValue(context.Background(), tenant{}, "acme")
	_ = db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		return outbox.Add(tx, outbox.Message{Type: "order.placed"})
	})
	_, _ = ob.Drain(ctx)
	// Output: order.placed acme
}

func ExampleInstance_Start() {
	db, closeDB := tempDB()
	defer closeDB()
	delivered := make(chan string)
	ob := use(db, outbox.Config{Outboxes: []outbox.Outbox{{
		Name: "orders",
		Relay: outbox.Each(func(_ context.Context, e outbox.Envelope) error {
			delivered <- e.Type
			return nil
		}),
	}}})
	ctx := context.Background()
	if err := ob.Start(ctx); err != nil {
		panic(err)
	}
	_ = db.Transaction(func(tx *gorm.DB) error {
		return outbox.Add(tx, outbox.NewEvent("order.placed", nil))
	})
	fmt.Println(<-delivered)

	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	fmt.Println(ob.Stop(ctx))
	// Output:
	// order.placed
	// <nil>
}

func ExampleInstance_Drain() {
	db, closeDB := tempDB()
	defer closeDB()
	ob := use(db, outbox.Config{Outboxes: []outbox.Outbox{{
		Name: "orders",
		Relay: outbox.Each(func(_ context.Context, e outbox.Envelope) error {
			if e.Type == "order.cancelled" {
				return errors.New("refused")
			}
			return nil
		}),
	}}})
	_ = db.Transaction(func(tx *gorm.DB) error {
		return outbox.Add(tx,
			outbox.NewEvent("order.placed", 1, outbox.Group("1")),
			outbox.NewEvent("order.cancelled", 2, outbox.Group("2")),
			outbox.NewEvent("order.placed", 2, outbox.Group("2")), // held by the one before
			outbox.NewEvent("order.placed", 3, outbox.Group("3"), outbox.After(time.Hour)))
	})
	result, err := ob.Drain(context.Background())
	fmt.Printf("%+v %v\n", result, err)
	// Output: {Delivered:1 Failed:1 Waiting:3} <nil>
}

// A message that can never be delivered is given up, and its group goes on.
func ExamplePermanent() {
	db, closeDB := tempDB()
	defer closeDB()
	ob := use(db, outbox.Config{Outboxes: []outbox.Outbox{{
		Name:        "orders",
		MaxAttempts: 10,
		Relay: outbox.Each(func(_ context.Context, e outbox.Envelope) error {
			if len(e.Payload) == 0 {
				return outbox.Permanent(errors.New("no payload"))
			}
			fmt.Println(string(e.Payload))
			return nil
		}),
	}}})
	_ = db.Transaction(func(tx *gorm.DB) error {
		return outbox.Add(tx, outbox.Message{Type: "t", GroupKey: "g"}, outbox.Message{Type: "t", GroupKey: "g", Payload: []byte("second")})
	})
	_, _ = ob.Drain(context.Background())
	// Output: second
}

// While a destination is down, no message is charged.
func ExampleUnavailable() {
	db, closeDB := tempDB()
	defer closeDB()
	down := true
	ob := use(db, outbox.Config{Outboxes: []outbox.Outbox{{
		Name:        "orders",
		MaxAttempts: 1,
		Relay: outbox.Each(func(_ context.Context, e outbox.Envelope) error {
			if down {
				return outbox.Unavailable(errors.New("connection refused"))
			}
			fmt.Println("delivered, attempts before:", e.Attempts)
			return nil
		}),
	}}})
	_ = db.Transaction(func(tx *gorm.DB) error { return outbox.Add(tx, outbox.Message{Type: "t"}) })
	result, _ := ob.Drain(context.Background())
	fmt.Printf("%+v\n", result)
	down = false
	_, _ = ob.Drain(context.Background())
	// Output:
	// {Delivered:0 Failed:0 Waiting:1}
	// delivered, attempts before: 0
}

// A relay that sends a whole batch says which messages failed. After the first
// failure in a group it must not send the group's later messages.
func ExampleRelay() {
	db, closeDB := tempDB()
	defer closeDB()
	ob := use(db, outbox.Config{Outboxes: []outbox.Outbox{{Name: "orders", Relay: batchRelay{}}}})
	_ = db.Transaction(func(tx *gorm.DB) error {
		return outbox.Add(tx, outbox.NewEvent("order.placed", 1), outbox.NewEvent("order.placed", -2), outbox.NewEvent("order.placed", 3))
	})
	result, _ := ob.Drain(context.Background())
	fmt.Printf("%+v\n", result)
	// Output:
	// sent 1
	// sent 3
	// {Delivered:2 Failed:1 Waiting:1}
}

type batchRelay struct{}

func (batchRelay) Deliver(_ context.Context, batch []outbox.Envelope) error {
	var failed outbox.BatchError
	for _, e := range batch {
		if e.Payload[0] == '-' {
			failed.Fail(e.ID, errors.New("negative"))
			continue
		}
		fmt.Println("sent", string(e.Payload))
	}
	if len(failed.Failed) == 0 {
		return nil
	}
	return &failed
}

// A destination that says when to come back is not asked before.
func ExampleRetryAfter() {
	db, closeDB := tempDB()
	defer closeDB()
	ob := use(db, outbox.Config{Outboxes: []outbox.Outbox{{
		Name: "orders",
		Relay: outbox.Each(func(context.Context, outbox.Envelope) error {
			return outbox.RetryAfter(errors.New("429 Too Many Requests"), time.Minute)
		}),
	}}})
	_ = db.Transaction(func(tx *gorm.DB) error { return outbox.Add(tx, outbox.Message{Type: "t"}) })
	for range 2 {
		result, _ := ob.Drain(context.Background())
		fmt.Printf("%+v\n", result)
	}
	// Output:
	// {Delivered:0 Failed:1 Waiting:1}
	// {Delivered:0 Failed:0 Waiting:1}
}

// counter counts what was delivered, as a metric would.
type counter struct{ delivered int }

func (c *counter) Observe(o outbox.Observation) {
	if o.Kind == outbox.BatchDone {
		c.delivered += o.Delivered
	}
}

func ExampleObserver() {
	db, closeDB := tempDB()
	defer closeDB()
	c := &counter{}
	ob := use(db, outbox.Config{
		Observer: c,
		Outboxes: []outbox.Outbox{{Name: "orders", Relay: printer}},
	})
	_ = db.Transaction(func(tx *gorm.DB) error { return outbox.Add(tx, outbox.NewEvent("order.placed", 1)) })
	_, _ = ob.Drain(context.Background())
	fmt.Println(c.delivered)
	// Output:
	// order.placed 1
	// 1
}

func ExampleInstance_Check() {
	db, closeDB := tempDB()
	defer closeDB()
	ob, err := outbox.New(outbox.Config{Outboxes: []outbox.Outbox{{Name: "orders"}}})
	if err != nil {
		panic(err)
	}
	if err := db.Use(ob); err != nil {
		panic(err)
	}
	fmt.Println(errors.Is(ob.Check(context.Background()), outbox.ErrNotMigrated))
	if err := outbox.AutoMigrate(db); err != nil {
		panic(err)
	}
	fmt.Println(ob.Check(context.Background()))
	// Output:
	// true
	// <nil>
}

// A job that publishes and exits has its notifications sent first.
func ExampleInstance_Flush() {
	db, closeDB := tempDB()
	defer closeDB()
	ob := use(db, outbox.Config{Outboxes: []outbox.Outbox{{Name: "orders"}}})
	_ = db.Transaction(func(tx *gorm.DB) error { return outbox.Add(tx, outbox.Message{Type: "t"}) })

	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	fmt.Println(ob.Flush(ctx))
	// Output: <nil>
}
